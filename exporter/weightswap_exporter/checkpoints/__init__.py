"""What trainers save, opened tensor by tensor."""
