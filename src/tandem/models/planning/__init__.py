"""Planning of how a checkpoint will be run, before a weight is read."""
