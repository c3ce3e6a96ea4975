"""Write every HTTP endpoint into docs/reference/endpoints.md: the frontend's from its route table, others from the source."""

import ast
import sys
import tempfile
from collections.abc import Iterator
from unittest.mock import MagicMock

from tools.pages import REFERENCE, ROOT, code, table, write

from dynamo.console import routes as console_routes
from dynamo.core.metrics import MetricsRegistry
from dynamo.http.routes.api_options import ApiOptions
from dynamo.http.routes.groups import GROUPS
from dynamo.http.routes.table import RouteContext, RouteTable, routes_of

PAGE = REFERENCE / "endpoints.md"
SERVICES = ("indexer", "slot_tracker", "select_service", "routing")
STATIC = (".js", ".css", ".svg")
"""Files of the console's pages, which are not listed."""
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
HEAD = """# HTTP endpoints

Written by `tools/endpoints_page.py` from the code; `make references` updates it. [Endpoints](../endpoints.md) describes the workers
behind the frontend's routes, [observability](../observability.md) the system port of workers, [routing](../routing.md) the services.

## Frontend

All optional APIs are shown. *Key*: `open` needs none, `key` any API key, `admin` an admin key, on a server with API keys.
`GET /openapi.json` describes the bodies.

"""


def main() -> int:
    """Rewrite the page."""
    return write(PAGE, content())


def content() -> str:
    """Return the page."""
    rows = [
        (
            code(f"{one.method} {one.path}"),
            one.operation.summary,
            one.access.value,
            "yes" if one.operation.streams else "",
        )
        for one in frontend_routes().entries
        if not one.path.endswith(STATIC)
    ]
    parts = [HEAD + table(("endpoint", "", "key", "streams"), rows)]
    for package in SERVICES:
        found = sorted(set(service_routes(package)), key=lambda one: (one[1], one[0]))
        if found:
            endpoints = "\n".join(f"- `{method} {path}`" for method, path in found)
            name = "Replica synchronization of services" if package == "routing" else f"`python -m dynamo.{package}`"
            parts.append(f"## {name}\n\n{endpoints}\n")
    return "\n".join(parts)


def frontend_routes() -> RouteTable:
    """Return the frontend's route table with every optional API enabled."""
    with tempfile.TemporaryDirectory() as folder:
        apis = ApiOptions(enable_anthropic=True, batch_dir=folder)
        stub = MagicMock()
        return routes_of(
            RouteContext(stub, stub, MetricsRegistry(), lambda: True, apis=apis), (*GROUPS, console_routes.add)
        )


def service_routes(package: str) -> Iterator[tuple[str, str]]:
    """Yield the method and path of each route of a package: pairs of a method and a path, or `Route(path, methods=[...])`."""
    for path in sorted((ROOT / "src" / "dynamo" / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case (
                    ast.Call(args=[ast.Constant(value=str(method)), ast.Constant(value=str(route)), *_])
                    | ast.Tuple(elts=[ast.Constant(value=str(method)), ast.Constant(value=str(route)), *_])
                ) if method in METHODS and route.startswith("/"):
                    yield method, route
                case ast.Call(func=ast.Name(id="Route"), args=[ast.Constant(value=str(route)), *_], keywords=keywords):
                    methods = next((one.value for one in keywords if one.arg == "methods"), None)
                    names = ast.literal_eval(methods) if methods is not None else ["GET"]
                    yield from ((method, route) for method in names)


if __name__ == "__main__":
    sys.exit(main())
