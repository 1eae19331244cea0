"""Engines: they execute graphs, each bound once to an arena. Each is a row in `choosing`."""
