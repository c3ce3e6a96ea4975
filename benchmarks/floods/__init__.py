"""Floods: delays of other clients' tokens while one client sends the largest possible requests (`python -m benchmarks.floods`)."""
