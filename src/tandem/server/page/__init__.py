"""The page at ``/``: one bundle of static files, and the routes that serve it."""
