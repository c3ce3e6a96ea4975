"""Request serving: find the model, preprocess, route, send, retry, and write the response.

Must not import: HTTP or gRPC servers; a response is written through `response_stream.ResponseStream`.
"""
