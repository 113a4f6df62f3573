"""Parsers that split a generation's text into answer, reasoning and tool calls."""
