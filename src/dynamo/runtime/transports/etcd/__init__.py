"""etcd client over the JSON gateway that every member serves next to gRPC; `protocol` does no I/O.

This package contains settings, messages, connections and the client of one member. It does not depend on the records.
"""
