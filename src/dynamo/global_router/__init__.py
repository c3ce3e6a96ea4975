"""A router of routers: chooses the pool of workers by a request's length and latency targets (`dynamo.global_router`).

`main` holds its options and serves each stage, `handler` forwards requests, `pool_selection` is its configuration file and
the choice of a pool. Within a pool, the pool's own router chooses the worker.
"""
