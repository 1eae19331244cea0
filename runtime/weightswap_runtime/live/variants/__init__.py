"""Variants: sets of tensors that calls choose among, resident side by side over one set of weights."""
