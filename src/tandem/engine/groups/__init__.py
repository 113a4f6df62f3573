"""Memory in groups: states of sequences beside the KV cache, and which of them are kept."""
