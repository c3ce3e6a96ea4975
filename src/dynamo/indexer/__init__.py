"""The KV index as a separate process, for any engine that publishes KV events: `python -m dynamo.indexer`.

`main` holds its options and HTTP API. The index is in `kv_router`, the models it follows in `routing.services`.
"""
