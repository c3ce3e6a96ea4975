"""Route extensions: their definition and discovery."""

from typing import Any

import pytest

import dynamo.llm
from dynamo.core.errors import ConfigError
from dynamo.http.extensions import FrontendExtensionContext, FrontendResponse, FrontendRoute, load_extensions


def fail(context: FrontendExtensionContext) -> object:
    raise ValueError("secret")


async def asynchronous(context: FrontendExtensionContext) -> object:
    return None


@pytest.mark.parametrize(
    ("method", "path", "handler", "error"),
    [
        ("POST", "/x", fail, ValueError),
        ("GET", "x", fail, ValueError),
        ("GET", "/{x}", fail, ValueError),
        ("GET", "/a/:x", fail, ValueError),
        ("GET", "/a b", fail, ValueError),
        ("GET", "/x", 5, TypeError),
        ("GET", "/x", asynchronous, ValueError),
    ],
)
def test_invalid_extension_route_is_refused(method: str, path: str, handler: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        FrontendRoute(method, path, handler)


def test_invalid_extension_response_status_is_refused() -> None:
    with pytest.raises(ValueError, match="invalid status code 99"):
        FrontendResponse(99, {})


def provide() -> FrontendRoute:
    return FrontendRoute("GET", "/provided", fail)


def provide_none() -> None:
    return None


def provide_wrong() -> object:
    return [5]


def test_extension_providers_are_loaded_by_path_once() -> None:
    routes = load_extensions([f"{__name__}:provide", f"{__name__}:provide", f"{__name__}:provide_none"])
    assert [route.path for route in routes] == ["/provided"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("unknown", "no such entry point"),
        ("no.such.module:provide", "no.such.module|No module named"),
        (f"{__name__}:nothing", "nothing"),
        (f"{__name__}:pytest", "must name a callable"),
        (f"{__name__}:provide_wrong", "must return FrontendRoute objects"),
    ],
)
def test_invalid_extension_provider_is_a_config_error(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_extensions([name])


def test_extension_classes_are_importable_from_dynamo_llm() -> None:
    assert dynamo.llm.FrontendRoute is FrontendRoute  # type: ignore[attr-defined]
    assert dynamo.llm.FrontendResponse is FrontendResponse  # type: ignore[attr-defined]
