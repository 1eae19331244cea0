"""From a module to graphs, tables, signatures, the conversion and an archive."""
