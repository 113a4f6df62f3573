"""The APIs that clients speak: one ``Dialect`` each, from the body of a request to its answer."""
