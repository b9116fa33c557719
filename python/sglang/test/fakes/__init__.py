"""Stand-ins that tests drive, all named fake: ranks, groups, workers, channels, models and managers."""
