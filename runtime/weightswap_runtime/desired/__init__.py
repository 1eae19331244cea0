"""Which weights every process of a service should serve: a small document in a directory or behind a URL."""
