"""One copy of the weights for all processes of a machine that serve them: a keeper changes it, workers map it."""
