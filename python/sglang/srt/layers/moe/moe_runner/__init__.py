"""How the experts of one layer are computed."""
