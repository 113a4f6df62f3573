"""Sources of weights: a file for each kind of container, ``source`` for what all promise."""
