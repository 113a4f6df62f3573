"""From a plan to a model that runs: the skeleton, its operators, packed weights."""
