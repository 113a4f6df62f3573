"""The APIs of generation that clients speak: one ``Dialect`` each, from a request's body to its
answer.
"""
