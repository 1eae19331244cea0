"""What the Open Inference Protocol's documents and tensors look like, in JSON and as bytes."""
