"""The admin plane: what operators do to the models of a server, on a port or a socket of its own."""
