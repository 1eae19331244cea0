"""How a checkpoint becomes weights: recorded by tracing the code that loads it."""
