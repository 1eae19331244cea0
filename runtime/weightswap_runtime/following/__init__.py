"""Which weights a model shall have, and the controller that serves them."""
