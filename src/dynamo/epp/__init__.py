"""Endpoint picker of the Gateway API inference extension: `python -m dynamo.epp` chooses the worker of each gateway request.

A gateway calls it over Envoy's `ext_proc` protocol. `phases` (pure) follows one HTTP request through the protocol,
`server` holds the gRPC services, and a picker chooses the worker: `model_picker` with the production KV router on workers
of a Dynamo runtime, `pod_picker` on engine pods without one. It must not forward requests: the gateway does.
"""
