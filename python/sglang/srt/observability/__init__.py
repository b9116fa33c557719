"""Traces, metrics, statistics and logs of the engine."""
