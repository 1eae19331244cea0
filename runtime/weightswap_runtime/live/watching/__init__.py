"""A directory or prefix followed: each new file swapped in, and failures put aside."""
