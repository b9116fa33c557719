"""The pools that hold keys and values, one layout a file."""
