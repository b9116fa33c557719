"""The steps of resolution, one topic a file, and their order."""
