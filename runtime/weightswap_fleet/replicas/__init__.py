"""What answers requests: replicas, which of them are asked, and nobody who goes back to older weights."""
