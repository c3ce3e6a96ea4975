"""Kubernetes operator: admission rules, defaults and conversion of the API types, and the webhooks that serve them.

The rules, the defaults and the conversion are pure; `dynamo deploy validate` uses the same functions offline. The webhook
server is the acting part. May depend on `dynamo.k8s` and `dynamo.protocols`; must not depend on a frontend or a worker.
"""
