"""The models of others."""
