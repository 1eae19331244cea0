"""The documents and tensors of the Open Inference Protocol, in JSON and as bytes."""
