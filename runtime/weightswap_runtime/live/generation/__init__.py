"""Generation of tokens with the methods `prefill` and `decode`, on any engine."""
