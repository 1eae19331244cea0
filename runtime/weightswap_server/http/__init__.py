"""The protocol over HTTP."""
