"""KServe v2 over gRPC: text models and tensor models for clients of Triton (serving-plane.md §1.10).

Lives here: the messages of the protocol, and how requests and answers of models are put into them.
Must not know: how HTTP clients are answered. Text goes through the pipeline like everybody's.

Needs the extra `grpc`.
"""
