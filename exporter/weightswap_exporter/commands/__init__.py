"""Commands of the build machine, with recipes and `hf:DIR`."""
