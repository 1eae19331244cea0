"""How all nodes change, or none: the agreement, trials on all nodes, and the actor that leads both."""
