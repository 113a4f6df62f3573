"""Several models behind one address: which of them are awake, and which answers a request."""
