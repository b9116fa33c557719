"""Draft models, reached by the architecture name of their checkpoint through their own registry."""
