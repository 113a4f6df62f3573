"""OpenAI's files and batches: what is kept of them, their endpoints, and the work on them."""
