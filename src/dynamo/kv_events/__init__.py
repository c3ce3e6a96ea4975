"""KV cache events: publishing, relaying, subscribing, durable streams and snapshots; forward-pass metrics.

Must not import routing decisions, serving or HTTP.
"""
