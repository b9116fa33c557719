"""Helpers that tests import; nothing in the engine imports them."""
