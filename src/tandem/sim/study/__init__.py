"""Studies: many runs of a scenario, and what they say together."""
