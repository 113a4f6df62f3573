"""Studies: results that combine many runs of a scenario."""
