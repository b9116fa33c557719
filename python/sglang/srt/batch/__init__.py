"""Requests and forward batches as plain data, imported by everything that acts on them."""
