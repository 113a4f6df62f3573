"""Schemas of the manifests that are rendered."""
