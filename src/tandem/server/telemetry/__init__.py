"""What the server tells of itself: metrics, timelines, spans, the load log."""
