"""A node of a fleet: the memory that its replicas serve, its part in changes, and what it takes from other nodes."""
