"""What clients ask for: the endpoints, and what their requests and answers have in common."""
