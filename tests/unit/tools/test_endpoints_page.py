"""docs/reference/endpoints.md contains the routes of the frontend and of the services."""

from tools import endpoints_page


def test_frontend_and_services_are_in_the_page() -> None:
    text = endpoints_page.content()
    for endpoint in (
        "POST /v1/chat/completions",
        "POST /v1/messages",
        "GET /v1/batches",
        "POST /select",
        "POST /query",
    ):
        assert f"`{endpoint}`" in text


def test_routes_of_services_are_found() -> None:
    assert ("POST", "/register") in set(endpoints_page.service_routes("indexer"))
    assert ("PATCH", "/workers/{}") in set(endpoints_page.service_routes("select_service"))
