"""The replicas that answer requests, their router, and the order of revisions that a client sees."""
