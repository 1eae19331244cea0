"""Calls of the eager model, recorded."""
