"""KV blocks across device, host, disk and object store (docs/kvbm.md).

`logical` decides where each block is stored and which blocks move, without access to their bytes; `physical` stores the
bytes; the manager owns both, and the threads that copy between them. The package has no notion of tokens or requests.
"""
