"""Runs the model: composes weights, caches, attention and graphs into one forward."""
