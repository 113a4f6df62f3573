"""Several models behind one address: which of them are awake, and who answers a request."""
