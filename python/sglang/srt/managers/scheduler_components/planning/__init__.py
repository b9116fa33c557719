"""Which requests run next: the two planners, the order of the queue, and who waits for the other replicas."""
