"""The parts that the scheduler is composed of: each one noun, handed what it needs."""
