"""A node of a fleet: its shared memory, its part in changes, and the relay of weights between nodes."""
