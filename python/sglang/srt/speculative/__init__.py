"""Drafting and verifying."""
