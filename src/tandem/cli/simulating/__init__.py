"""Commands of the simulator: ``tandem sim``."""
