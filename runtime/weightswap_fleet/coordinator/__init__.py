"""The coordination of all nodes: the agreement on changes, trials, and the actor that leads both."""
