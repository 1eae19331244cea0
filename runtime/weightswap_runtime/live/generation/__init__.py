"""Generating tokens with the methods `prefill` and `decode`, whatever executes them."""
