"""Stand-ins for ranks, schedulers, models and managers."""
