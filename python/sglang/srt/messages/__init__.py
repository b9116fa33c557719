"""Messages that cross a process border, and the fields of requests."""
