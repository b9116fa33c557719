"""The sampling parameters: how the tokens of a request are drawn."""
