"""Memory in groups: what layers of one kind keep of a sequence, and at which tokens all have it."""
