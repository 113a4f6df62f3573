"""Entry points that accept other programs' command lines, and the deployment of clusters."""
