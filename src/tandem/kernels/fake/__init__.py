"""A device that is none, for tests: CPU operators behind the ``Device`` protocol."""
