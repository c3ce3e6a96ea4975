"""Servers that `benchmarks.epp_picks` loads, each a process that records the pauses of its event loop.

python -m benchmarks.epp_servers picker PAUSES_FILE OPTION...
python -m benchmarks.epp_servers echo PAUSES_FILE PORT
"""

import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from benchmarks.pauses import recorded
from dynamo.epp.config import read
from dynamo.epp.main import serve
from dynamo.epp.messages import CLASSES, SERVICE
from dynamo.runtime.run_service import run_service


@asynccontextmanager
async def echo(port: int) -> AsyncIterator[None]:
    """Serve the reference: two answers to the second message of each stream."""
    answer = CLASSES["ProcessingResponse"]()
    answer.request_headers.response.header_mutation.set_headers.add().header.raw_value = b"x" * 100
    data = answer.SerializeToString()

    async def process(_: Any, context: Any) -> None:
        while await context.read() is not grpc.aio.EOF:
            await context.read()
            await context.write(data)
            await context.write(data)

    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    methods = {"Process": grpc.stream_stream_rpc_method_handler(process)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    yield
    await server.stop(None)


def main(argv: Sequence[str]) -> int:
    """Run a server until it is stopped."""
    kind, path, *options = argv
    service = serve(read(options)) if kind == "picker" else echo(int(options[0]))
    return run_service("epp", recorded(service, Path(path)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
