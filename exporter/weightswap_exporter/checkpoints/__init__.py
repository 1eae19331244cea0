"""Reading of trainers' checkpoints, tensor by tensor."""
