"""Interconnect: whether KV blocks and collectives use RDMA or NVLink on a node, in a pod and in a recipe, or fall back to TCP."""
