"""Capture of a module: graphs, tables, signatures and archives."""
