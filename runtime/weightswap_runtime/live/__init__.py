"""Models: their calls, their swaps, and the gate between the two."""
