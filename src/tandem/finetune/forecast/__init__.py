"""What a run will take in memory and time."""
