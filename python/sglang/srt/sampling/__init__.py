"""Sampling parameters: the words a request uses to say how its tokens are drawn."""
