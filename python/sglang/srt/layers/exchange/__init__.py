"""Rows that attention replicas exchange between layers, and their padding."""
