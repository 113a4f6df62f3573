"""Commands that send requests for text to a server, and their common parts."""
