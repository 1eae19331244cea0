"""The admin plane: operations on the models of a server, on a port or a Unix socket of its own."""
