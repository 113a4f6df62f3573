"""JSON schemas of the Kubernetes manifests that are rendered."""
