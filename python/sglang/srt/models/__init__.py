"""Model architectures, reached by the checkpoint's architecture name through the registry."""
