"""Relay of one data center's KV state: the cached blocks, readiness and load of its endpoints, for consumers elsewhere.

Follows the model cards, instances and KV events of the selected namespaces and serves them over gRPC
(`dynamo.kvrelay.v1.KvEventRelay`). A pool is one endpoint's cached blocks; it is sent as a cuckoo filter, so that the
full event stream never leaves the data center. Must not route requests or merge pools.
"""
