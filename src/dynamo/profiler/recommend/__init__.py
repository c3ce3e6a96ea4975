"""Recommendation: the best deployment for a workload, found by simulating the production router on it."""
