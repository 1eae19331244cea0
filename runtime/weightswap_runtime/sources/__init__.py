"""Bytes at a path or URL: found, read without changing under us, written whole."""
