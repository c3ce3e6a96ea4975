"""Profiler: from a model, GPUs and latency targets to a deployment that meets them."""
