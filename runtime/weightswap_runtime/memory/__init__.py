"""Memory for sets of weights, at addresses that never change, and copying into it."""
