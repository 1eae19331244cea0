"""Recording of the adapter, from checkpoints to weights, by tracing the code that loads them."""
