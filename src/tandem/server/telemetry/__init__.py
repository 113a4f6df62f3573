"""The server's reports about itself: metrics, timelines, spans, the load log."""
