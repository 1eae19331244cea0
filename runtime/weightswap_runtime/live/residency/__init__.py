"""The two ways to hold weights, and what a staging leads to in each."""
