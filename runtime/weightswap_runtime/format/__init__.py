"""File formats, parsed and checked: artifacts, weight files, deltas, goldens. No torch, no threads."""
