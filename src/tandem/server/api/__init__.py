"""The HTTP endpoints, and the parts that their requests and answers share."""
