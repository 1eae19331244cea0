"""What people look through: the commands, inspect, diff, bench, reports. Imports the library, never the exporter."""
