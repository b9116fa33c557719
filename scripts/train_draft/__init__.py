"""Trains an EAGLE3 draft for a Llama-architecture target on the target's own generations."""
