"""Connectors: count the workers of a deployment, and change their number."""
