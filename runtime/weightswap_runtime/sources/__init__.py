"""Sources of bytes at a path or URL, with detection of changes during a read, and files that are written whole."""
