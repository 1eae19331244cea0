"""Engines: they execute graphs, each bound once to an arena. Each is a package here and a row in `choosing`."""
