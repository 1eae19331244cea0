"""Comparisons shown on a terminal and on a page."""
