"""Remote sources: objects behind fsspec URLs. Imported only for a URL; needs the extra `remote`."""
