"""Staging of weights: a file is planned, read, computed and checked, and becomes a verified set of weights."""
