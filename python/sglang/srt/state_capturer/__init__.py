"""Recorders of what a forward decided inside: experts chosen, indices chosen."""
