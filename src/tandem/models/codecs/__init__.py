"""How checkpoints store weights: a file for each format, ``codec`` for what all promise."""
