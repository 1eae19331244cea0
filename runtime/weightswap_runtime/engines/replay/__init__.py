"""CUDA graphs of calls: captured for a shape once, replayed."""
