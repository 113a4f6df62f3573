"""Memory beside the full KV blocks: recurrent states and their snapshots, and window blocks."""
