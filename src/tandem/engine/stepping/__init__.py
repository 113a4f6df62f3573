"""Execution of steps: messages to the runner, the runner itself, and sampling from its logits."""
