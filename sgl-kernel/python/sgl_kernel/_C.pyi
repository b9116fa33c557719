"""Importing the compiled module registers the operators with torch; it has no names of its own."""
