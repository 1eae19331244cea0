"""The service behind HTTP and gRPC: models by name, their threads, generations, metrics and traces."""
