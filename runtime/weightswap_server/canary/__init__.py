"""Canaries: staged weights that answer some requests, or are called beside them, before a commit."""
