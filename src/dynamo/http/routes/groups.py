"""Route groups: all modules that add routes to the service, in the order of the OpenAPI document."""

from dynamo.http.routes import anthropic as routes_anthropic
from dynamo.http.routes import batches as routes_batches
from dynamo.http.routes import embeddings as routes_embeddings
from dynamo.http.routes import extensions as routes_extensions
from dynamo.http.routes import media as routes_media
from dynamo.http.routes import native as routes_native
from dynamo.http.routes import openai as routes_openai
from dynamo.http.routes import planner as routes_planner
from dynamo.http.routes import realtime as routes_realtime
from dynamo.http.routes import responses as routes_responses
from dynamo.http.routes import routing as routes_routing
from dynamo.http.routes import system as routes_system
from dynamo.http.routes.table import RouteContext, RouteGroup, RouteTable

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
    routes_planner.add,
    routes_system.add,
    routes_extensions.add,
)


def metrics_group(routes: RouteTable, context: RouteContext) -> None:
    """Add metrics, health, models and extensions: the routes of a frontend whose requests arrive over another protocol.

    None of them changes state or sends requests to workers.
    """
    for add in (routes_openai.add, routes_system.add, routes_extensions.add):
        add(routes, context)
    routes.keep_only("GET")
