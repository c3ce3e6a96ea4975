"""KServe v2 over gRPC: text models and tensor models for clients of Triton.

Contains the messages of the protocol, and the conversion of requests and responses of models.
Must not know: HTTP routes. Text requests use the same pipeline as those over HTTP.

Needs the extra `grpc`.
"""
