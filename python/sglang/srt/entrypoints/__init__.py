"""The doors of the engine: the HTTP server with its routes, and `Engine` for Python."""
