"""The forecast of a run's memory and time."""
