"""Reconcile: the objects that a graph and its components require. Pure."""
