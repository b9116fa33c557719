"""What configurations of single architectures say, and how it is read."""
