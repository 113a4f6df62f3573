"""JSON Schemas rewritten without the keywords that llguidance lacks; pure."""
