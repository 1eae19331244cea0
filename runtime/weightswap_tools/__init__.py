"""Command-line tools: the commands, inspect, diff, bench and reports. Never imports the exporter."""
