"""Metrics group: what a frontend answers over HTTP where its requests come another way: what one may look at."""

from dynamo.http.routes import openai as routes_openai
from dynamo.http.routes import system as routes_system
from dynamo.http.routes.table import RouteContext, RouteTable


def metrics_group(routes: RouteTable, context: RouteContext) -> None:
    """Adds metrics, health and the models, and nothing that changes or asks anything."""
    routes_openai.add(routes, context)
    routes_system.add(routes, context)
    routes.entries = [one for one in routes.entries if one.method == "GET"]
