"""Placement and movement of blocks: pools, policies, filters and queues. Pure: no bytes, no threads, no clock."""
