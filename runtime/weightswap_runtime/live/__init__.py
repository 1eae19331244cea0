"""Which weights answer which call: the store of weights, stagings, commits, and the gate between calls and commits."""
