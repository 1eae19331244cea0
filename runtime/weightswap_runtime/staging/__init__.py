"""A file becomes a verified set of weights: planned, read, computed, checked."""
