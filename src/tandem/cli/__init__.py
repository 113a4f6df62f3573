"""The ``tandem`` command: each module parses, builds a configuration and calls one function."""
