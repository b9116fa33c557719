"""Recorders of what a forward chose: experts and attention indices."""
