"""One set of weights at addresses that never change, and moving bytes into it."""
