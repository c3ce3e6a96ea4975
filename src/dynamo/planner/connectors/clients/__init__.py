"""Clients of the processes that scale deployments."""
