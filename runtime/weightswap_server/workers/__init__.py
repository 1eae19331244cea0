"""Several processes that serve one copy of the weights."""
