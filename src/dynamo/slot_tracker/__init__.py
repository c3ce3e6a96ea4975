"""Load tracking as a separate process: `python -m dynamo.slot_tracker`.

Contents: its options, its routes and its state. The load of a rank is computed in `kv_router`.
"""
