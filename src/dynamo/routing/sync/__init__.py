"""Synchronization between router replicas: booked requests and session affinity."""
