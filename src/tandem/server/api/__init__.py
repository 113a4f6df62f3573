"""The API that clients use: the endpoints, and what their requests and answers have in common."""
