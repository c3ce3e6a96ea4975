"""The HTTP API: server, routes and the OpenAPI document.

Must not know: how a request reaches a worker (that is `dynamo.pipeline`), or how text is made from tokens.
"""
