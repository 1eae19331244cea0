"""What executes a graph, bound once to an arena. Each engine is a package here, and a row in `choosing`."""
