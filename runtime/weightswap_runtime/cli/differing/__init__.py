"""What `weightswap diff` shows."""
