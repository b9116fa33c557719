"""Attention back ends, reached through their registry."""
