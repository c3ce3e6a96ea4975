"""A router of routers: chooses the pool of workers by a request's length and latency targets (`dynamo.global_router`).

Contents: its options, its configuration file, the choice of a pool, and the handlers that forward requests. Within a
pool, the pool's own router chooses the worker.
"""
