"""Inspection of artifacts, weight files, checkpoints, deltas and goldens."""
