"""Which block is where, and which one moves: pools, policies, filters and queues. Pure: no bytes, no threads, no clock."""
