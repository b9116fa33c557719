"""Runs a batch: eagerly, or by replaying a recorded graph."""
