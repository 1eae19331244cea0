"""Watchers of directories and followers of places: threads that keep a model at new or desired weights."""
