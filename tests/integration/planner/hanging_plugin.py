"""A PROPOSE plugin in a process of its own, which a test pauses: `hanging_plugin PORT REPLICAS`."""

import asyncio
import sys
from typing import Any

import grpc

from dynamo.planner.plugin_transport.messages import CLASSES, SERVICES


async def main(port: str, replicas: int) -> None:
    """Serve until terminated."""

    async def propose(request: Any, context: Any) -> Any:
        response = CLASSES["ProposeStageResponse"]()
        response.override.targets.add(sub_component_type="decode", replicas=replicas)
        return response

    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(
        propose,
        request_deserializer=CLASSES["ProposeStageRequest"].FromString,
        response_serializer=CLASSES["ProposeStageResponse"].SerializeToString,
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICES["Propose"], {"Propose": handler}),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
