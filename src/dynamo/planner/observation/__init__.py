"""Observation: traffic of the frontends, and forward passes of the workers."""
