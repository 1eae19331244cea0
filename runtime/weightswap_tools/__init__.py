"""What people look through: the commands, inspect, diff, bench, reports. Never imports the exporter."""
