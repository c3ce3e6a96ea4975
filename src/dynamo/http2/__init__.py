"""HTTP/2 and gRPC server of streams with many short messages, such as ext_proc.

`connection` (pure) is one HTTP/2 connection: bytes in, bytes out. `grpc_call` is one call, `grpc_server` the listener. One
thread, one write per pass of the event loop: grpcio's asyncio server costs several times as much for each stream.
Must not know: what is served.

Needs the extra `grpc`.
"""
