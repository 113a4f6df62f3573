"""Planning of a checkpoint, before a weight is read."""
