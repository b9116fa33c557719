"""Where experts are placed and how often each is chosen."""
