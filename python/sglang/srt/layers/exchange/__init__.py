"""What attention replicas exchange between two layers, and how it is padded."""
