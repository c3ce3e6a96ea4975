"""The KV index as a separate process, for any engine that publishes KV events: `python -m dynamo.indexer`.

Contents: its options, its routes, and the models that it follows. The index itself is in `kv_router`.
"""
