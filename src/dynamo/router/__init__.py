"""The KV router as a separate process in front of the workers of any endpoint: `python -m dynamo.router`.

`main` holds its options and endpoints. The routing decision is made in `kv_router` and carried out in `routing`.
"""
