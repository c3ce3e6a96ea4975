"""Route groups: all modules that add routes to the service, in the order in which the OpenAPI document shows them."""

from collections.abc import Sequence

from dynamo.llm.http import (
    routes_anthropic,
    routes_batches,
    routes_embeddings,
    routes_media,
    routes_native,
    routes_openai,
    routes_realtime,
    routes_responses,
    routes_routing,
    routes_system,
)
from dynamo.llm.http.routes import RouteContext, RouteGroup, RouteTable

GROUPS: tuple[RouteGroup, ...] = (
    routes_openai.add,
    routes_embeddings.add,
    routes_media.add,
    routes_native.add,
    routes_realtime.add,
    routes_responses.add,
    routes_anthropic.add,
    routes_batches.add,
    routes_routing.add,
    routes_system.add,
)


def all_routes(context: RouteContext, groups: Sequence[RouteGroup] = GROUPS) -> RouteTable:
    """The routes of every group."""
    table = RouteTable()
    table.asks_keys = context.keys is not None
    for add in groups:
        add(table, context)
    return table
