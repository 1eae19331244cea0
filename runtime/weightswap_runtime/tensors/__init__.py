"""One tensor as bytes: element types, digests, comparison; and its form in torch, if torch is installed."""
