"""Speculative decoding: drafting and verifying tokens."""
