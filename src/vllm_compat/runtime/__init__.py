"""What one process holds: its patches, the call under way, its account, its place in a launched run."""
