"""The native routes: `/generate` and its fields."""
