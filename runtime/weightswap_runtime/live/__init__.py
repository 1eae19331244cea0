"""Who is served what: models, swaps, calls, and the gate between them."""
