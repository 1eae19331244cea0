"""From a module to graphs, tables, signatures, the adapter and an archive."""
