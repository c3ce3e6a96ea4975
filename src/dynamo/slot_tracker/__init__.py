"""Load tracking as a separate process: `python -m dynamo.slot_tracker`.

`main` holds its options and HTTP API, `tracker` its state. The load of a rank is computed in `kv_router`.
"""
