"""Operator tooling: diagnosis of a machine and of deployments; pure checks over facts, and collectors that only read."""
