"""Acting routers: apply the decisions of `dynamo.kv_router` to live workers, and synchronize router replicas.

Must not import: serving or HTTP.
"""
