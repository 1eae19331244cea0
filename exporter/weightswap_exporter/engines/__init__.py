"""Other engines' files, made from an artifact."""
