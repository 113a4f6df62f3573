"""OpenAI's files and batches: their storage, their endpoints, and the worker that runs them."""
