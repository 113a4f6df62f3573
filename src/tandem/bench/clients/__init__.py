"""Clients for any server with OpenAI's API: loads, the sending of them, and the figures
of a run.
"""
