"""Weights on trial: what is staged answers some requests, or is called beside them, before it is committed."""
