"""The model that applications hold: its calls, its weights, the generation of tokens, and how it is loaded."""
