"""CUDA without a GPU: torch's CUDA build over an emulated runtime, for `scripts/test_emulated`."""
