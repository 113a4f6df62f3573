"""Rewriting of JSON Schemas without the keywords that llguidance lacks; pure."""
