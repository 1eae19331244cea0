"""Commands that call models, swap their weights, serve them, and control servers and fleets."""
