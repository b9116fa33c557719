"""Sampling parameters: how a request says its tokens are drawn."""
