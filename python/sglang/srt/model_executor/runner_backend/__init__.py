"""Records device work once and replays it."""
