"""Metrics group: read-only routes of a frontend whose requests arrive over another protocol."""

from dynamo.http.routes import openai as routes_openai
from dynamo.http.routes import system as routes_system
from dynamo.http.routes.table import RouteContext, RouteTable


def metrics_group(routes: RouteTable, context: RouteContext) -> None:
    """Add metrics, health and models; no route that changes state or sends requests to workers."""
    routes_openai.add(routes, context)
    routes_system.add(routes, context)
    routes.entries = [one for one in routes.entries if one.method == "GET"]
