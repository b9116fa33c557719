"""The doors: HTTP server, OpenAI routes, Engine, and the entry of a rank process."""
