"""Work in threads: its progress and end, listeners, and what a fork leaves of it. Knows no tensor."""
