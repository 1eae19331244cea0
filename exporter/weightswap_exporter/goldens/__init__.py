"""Recording of the eager model's calls as goldens."""
