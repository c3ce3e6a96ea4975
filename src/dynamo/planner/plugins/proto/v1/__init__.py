"""Version 1 of the protocol, `dynamo.planner.plugin.v1`: messages (`plugin_pb2`) and services (`plugin_pb2_grpc`).

They have the names of the modules that `protoc` generates, so that programs written for those run unchanged. They need the
extra `grpc`.
"""
