"""Clients of any server of OpenAI's API: loads, what they send, and the figures of a run."""
