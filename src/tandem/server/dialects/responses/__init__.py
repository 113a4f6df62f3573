"""OpenAI's Responses API: its items, its events and its stored responses."""
