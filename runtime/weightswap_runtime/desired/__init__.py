"""Desired states: small documents, local or behind a URL, that say which weights the processes of a service serve."""
