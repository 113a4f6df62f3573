"""Commands about the models that are kept on this machine, or served by it."""
