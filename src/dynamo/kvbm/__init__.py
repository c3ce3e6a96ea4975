"""KV blocks across device, host, disk and object store (docs/kvbm.md).

`logical` decides which block is where and which one moves, without touching a byte; `physical` holds the bytes; the
manager owns both, and the threads between them. What a token is, or a request, is not known here.
"""
