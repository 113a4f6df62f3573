"""The server's reports of itself: metrics, timelines, spans, the load log."""
