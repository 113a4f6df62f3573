"""Commands that ask a server for text, and what they share."""
