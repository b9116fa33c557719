"""A real server started by a test, and calls of its routes."""
