"""Sources of weights: a module for each kind of container, and ``source`` for their interface."""
