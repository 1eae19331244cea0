"""Variants: sets of the tensors that calls choose, resident side by side over one set of weights."""
