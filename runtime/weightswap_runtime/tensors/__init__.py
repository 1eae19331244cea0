"""One tensor as bytes: element types, digests, comparing; and torch's view of it, where torch is there."""
