"""From the text of a generation to its parts: answer, reasoning, tool calls."""
