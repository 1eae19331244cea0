"""The command line of the build machine; recipes, and `hf:DIR`."""
