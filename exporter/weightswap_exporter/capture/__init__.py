"""A module becomes graphs, tables, signatures and an archive."""
