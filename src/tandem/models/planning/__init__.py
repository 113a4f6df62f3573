"""What a checkpoint is and how it will run, before a weight is read."""
