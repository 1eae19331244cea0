"""What HTTP and gRPC have in common: models by name, the threads that call them, generations, metrics and traces."""
