"""A cluster written down in one file: as plain processes, as Kubernetes manifests, on Ray."""
