"""Commands that run, swap and cut deltas."""
