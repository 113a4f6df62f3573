"""Steps: their messages, what runs them, and sampling from their logits."""
