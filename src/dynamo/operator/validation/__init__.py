"""Admission rules of the resources of group nvidia.com. Pure.

`admission.review` checks one object, and an update against the object before it; it serves the validating webhook and
`dynamo deploy validate` alike. Each problem has a field path and a reason. Must not depend on a client.
"""
