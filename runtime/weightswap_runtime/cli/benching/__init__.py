"""What `weightswap bench` shows."""
