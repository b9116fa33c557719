"""Self-registration of test files."""
