"""The conductor of a rank (scheduler and its parts) and the request side of the server process."""
