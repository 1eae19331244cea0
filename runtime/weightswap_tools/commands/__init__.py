"""Commands that call models, change their weights, serve them, and ask servers and fleets."""
