"""Pages of the console in Chromium: every view shows real data, works by keyboard and on a phone, and causes no console error."""

import json
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select
from tests.cluster.cluster import MODEL, Cluster
from tests.integration.console.browser import PHONE, Browser, Chats, requires_chromium
from tests.integration.test_serve import Server

pytestmark = [pytest.mark.integration, requires_chromium]

SERVED = "demo_model"
VIEWS = ("overview", "workers", "routing", "requests", "playground", "planner", "reports")
PLANNER = '{"optimization_target": "sla", "ttft_ms": 400, "itl_ms": 40, "load_adjustment_interval_seconds": 1}'
MOCKER = ("--engine", "mocker", "--num-gpu-blocks-override", "400", "--block-size", "16")
REPORT = {
    "completed_requests": 200,
    "request_throughput_rps": 9.5,
    "output_throughput_tok_s": 590.0,
    "mean_itl_ms": 6.1,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder, reports = tmp_path_factory.mktemp("served"), tmp_path_factory.mktemp("reports")
    for name, ttft in (("round-robin", 212.0), ("kv-router", 88.0)):
        (reports / f"{name}.json").write_text(
            json.dumps({"summary": {**REPORT, "mean_ttft_ms": ttft, "p95_ttft_ms": 3 * ttft}})
        )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DYN_CONSOLE_REPORTS_DIR", str(reports))
        found = Server(
            folder, *MOCKER, "--workers", "2", "--max-workers", "3", "--planner", PLANNER, "--router-mode", "kv"
        )
    try:
        yield found.ready()
    finally:
        found.close()


@pytest.fixture(scope="module")
def browser(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile"), server.url) as found, Chats(server.url, SERVED):
        yield found


@pytest.fixture(autouse=True)
def no_errors(request: pytest.FixtureRequest) -> Iterator[None]:
    """Require that no test leaves an error in the console of its page."""
    browser: Browser = request.getfixturevalue("keyed" if "keyed" in request.fixturenames else "browser")
    yield
    assert browser.errors() == []


def numbers(browser: Browser, selector: str) -> list[str]:
    return [one.text for one in browser.all(selector)]


def test_overview_shows_live_rates_latencies_and_workers(browser: Browser) -> None:
    browser.view("overview")
    browser.until(lambda: browser.text("#status") == "Live", "the stream did not begin")
    browser.until(lambda: len(browser.all(".chart polyline")) >= 8, "the charts have no lines")
    text = browser.text()
    for word in ("First token p95", "tok/s", "KV blocks in use", SERVED, "ready"):
        assert word in text
    assert browser.text(".kpi:nth-child(7) strong") in ("2", "3")
    before = browser.text(".chart .legend")
    browser.until(lambda: browser.text(".chart .legend") != before, "the numbers do not change")
    browser.until(
        lambda: browser.driver.execute_script("return document.querySelector('.chart polyline').points.length") >= 12,
        "few samples",
    )
    browser.picture("overview")


def test_charts_are_read_by_arrow_keys(browser: Browser) -> None:
    browser.view("overview")
    browser.until(lambda: browser.one(".chart polyline"), "the charts have no lines")
    chart = browser.tab_to(lambda one: "canvas" in (one.get_attribute("class") or ""))
    assert "Arrow keys move through time" in (chart.get_attribute("aria-label") or "")
    browser.press(Keys.ARROW_LEFT)
    assert browser.one(".chart .cross") is not None
    assert "completed" in (chart.get_attribute("aria-label") or "")


def test_workers_show_role_load_cache_and_version(browser: Browser) -> None:
    browser.view("workers")
    browser.until(lambda: len(browser.all("tbody tr")) >= 2, "the workers are not listed")
    row = browser.text("tbody tr")
    for word in ("serving", "aggregated", "mocker", "dynamo 1.6.1", "none", "%"):
        assert word in row
    browser.until(lambda: browser.named("Drain").get_property("disabled"), "a user may drain")
    title = browser.until(lambda: browser.named("Drain").get_attribute("title"), "the button has no title")
    assert "admin key" in title
    browser.picture("workers")


def test_routing_draws_the_candidates_of_a_decision(browser: Browser) -> None:
    browser.view("routing")
    browser.until(lambda: len(browser.all(".picks li")) >= 5, "no decisions are listed")
    browser.until(lambda: len(browser.all(".costs li")) >= 2, "no candidates are drawn")
    assert len(browser.all(".costs .winner")) == 1
    assert "Chosen for its" in browser.text()
    second = browser.all(".picks button")[1]
    second.click()
    browser.until(
        lambda: browser.text("main .head a").endswith(browser.text(".picks [aria-current=true] code")),
        "the decision does not change",
    )
    browser.picture("routing")


def test_cause_of_a_slow_request_is_found_in_three_steps(browser: Browser) -> None:
    browser.view("overview")
    browser.named("Requests", "nav a").click()
    browser.until(lambda: browser.one("main .segmented"), "no tabs")
    browser.named("Slowest").click()
    browser.until(
        lambda: browser.all("tbody .strip") and "running" not in browser.text("tbody"), "not the slowest ones"
    )
    browser.picture("requests")
    browser.named("Pause").click()  # The table is not drawn again.
    first = browser.until(lambda: browser.text("tbody a"), "no request can be opened")
    browser.click(first, "tbody a")
    browser.until(lambda: len(browser.all(".waterfall li")) >= 5, "no waterfall")
    assert " went to " in browser.text(".notice")
    for word in ("Wait for first token", "Generate", "Cached blocks on the worker"):
        assert word in browser.text()
    browser.until(lambda: "Why this worker?" in browser.text(), "no link to the decision")
    browser.click("Why this worker?")
    browser.until(lambda: browser.all(".costs .winner"), "the decision is not drawn")


def test_requests_are_found_by_the_id_of_a_response(browser: Browser) -> None:
    browser.view("requests")
    request_id = browser.until(lambda: browser.one("tbody a"), "no request").get_attribute("title")
    search = browser.one("main input[type=search]")
    assert search is not None
    search.send_keys(f"chatcmpl-{request_id}", Keys.ENTER)
    browser.until(lambda: browser.all(".waterfall li"), "the request is not shown")


def test_playground_streams_a_response_and_links_its_request(browser: Browser) -> None:
    browser.view("playground")
    browser.until(lambda: browser.one("#pg-model option"), "no model is offered")
    tokens = browser.one("#pg-max_tokens")
    assert tokens is not None
    tokens.clear()
    tokens.send_keys("24")
    prompt = browser.one("#pg-prompt")
    assert prompt is not None
    prompt.send_keys("It's a test", Keys.CONTROL, Keys.ENTER)
    browser.until(lambda: "tok/s" in browser.text(".stats"), "no statistics of the answer")
    assert len(browser.text(".bubble.assistant .text")) > 5
    code = browser.text(".code")
    assert code.startswith("curl -N http://localhost")
    assert "It'\\''s a test" in code
    browser.named("Python").click()
    assert "OpenAI(base_url=" in browser.text(".code")
    compile(browser.text(".code"), "example", "exec")
    browser.picture("playground")
    browser.click("Show this request")
    browser.until(lambda: browser.all(".waterfall li"), "the request is not shown")


def test_playground_sends_tools_and_a_schema_and_names_invalid_json(browser: Browser) -> None:
    browser.view("playground")
    browser.until(lambda: browser.one("#pg-model option"), "no model is offered")
    for title in ("Tools", "JSON schema"):
        browser.named(title, "summary").click()
    for button in browser.all("details button"):
        button.click()
    assert "get_weather" in browser.text(".code")
    assert '"json_schema"' in browser.text(".code")
    tools = browser.one("#pg-tools")
    assert tools is not None
    tools.send_keys("oops")
    prompt = browser.one("#pg-prompt")
    assert prompt is not None
    prompt.send_keys("x", Keys.CONTROL, Keys.ENTER)
    browser.until(lambda: browser.text(".compose .problem").startswith("Tools:"), "the error is not shown")


def test_planner_shows_decisions_objectives_and_workers(browser: Browser) -> None:
    browser.view("planner")
    browser.until(lambda: len(browser.all("tbody tr")) >= 3, "no decisions are listed")
    text = browser.text()
    for word in ("First token within objective", "target sla", "Workers", "Demand", "Decisions"):
        assert word in text
    browser.picture("planner")


def test_reports_are_listed_and_compared(browser: Browser) -> None:
    browser.view("reports")
    browser.until(lambda: len(browser.all("tbody tr")) == 2, "the reports are not listed")
    for box in browser.all("input[type=checkbox]"):
        box.click()
    browser.until(lambda: "Comparison" in browser.text(), "no comparison")
    assert "88" in [one.text for one in browser.all("td strong")]
    browser.picture("reports")


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_view_fits_a_phone(browser: Browser, view: str, theme: str) -> None:
    browser.view(view, size=PHONE, theme=theme)
    browser.until(lambda: browser.all("main .card"), "the view is empty")
    width = browser.driver.execute_script("return document.documentElement.scrollWidth")
    assert width <= PHONE[0], "the page scrolls sideways"
    left, right = browser.driver.execute_script("""
        const link = document.querySelector('#nav [aria-current=page]').getBoundingClientRect();
        return [link.left, link.right];
    """)
    assert 0 <= left < right < PHONE[0] + 1, "the link of the view is hidden"
    assert browser.driver.execute_script("return document.documentElement.dataset.theme") == theme
    if view == "overview" and theme == "dark":
        browser.until(lambda: browser.all(".chart polyline"), "no lines")
        browser.picture("phone")


@pytest.mark.parametrize("view", VIEWS)
def test_controls_have_names_and_tables_have_headers(browser: Browser, view: str) -> None:
    browser.view(view)
    browser.until(lambda: browser.all("main .card"), "the view is empty")
    unnamed = browser.driver.execute_script("""
        const named = (one) => one.getAttribute('aria-label') || one.textContent.trim() || one.labels?.length || one.title;
        return [...document.querySelectorAll('button, a, input, select, textarea, [role=img]')].filter((one) => !named(one)).map((one) => one.outerHTML);
    """)
    assert unnamed == []
    assert browser.driver.execute_script("return document.querySelectorAll('main h1').length") == 1
    assert browser.driver.execute_script(
        "return [...document.querySelectorAll('table')].every((one) => one.querySelector('th[scope=col]') && one.caption)"
    )


def test_every_view_is_reached_by_keyboard_alone(browser: Browser) -> None:
    browser.view("overview")
    first = browser.press(Keys.TAB)
    assert first.text == "Skip to content"
    for view in VIEWS[1:]:
        browser.view("overview")
        browser.tab_to(lambda one, view=view: one.get_attribute("data-view") == view)
        browser.press(Keys.ENTER)
        browser.until(lambda view=view: browser.text("main h1").lower() == view, f"{view} did not open")
        assert browser.driver.switch_to.active_element.get_attribute("id") == "main"


def test_theme_is_changed_and_stored(browser: Browser) -> None:
    browser.view("overview", theme="light")
    toggle = browser.one("#theme")
    assert toggle is not None
    toggle.click()
    toggle.click()
    assert browser.driver.execute_script("return document.documentElement.dataset.theme") == "dark"
    browser.view("workers", theme="light")
    assert browser.driver.execute_script("return document.documentElement.dataset.theme") == "dark"
    browser.driver.execute_script("localStorage.clear()")


def test_nothing_is_requested_from_other_origins(browser: Browser, server: Server) -> None:
    browser.requested()
    for view in VIEWS:
        browser.view(view)
    own = urlsplit(server.url).netloc
    assert {urlsplit(one).netloc for one in browser.requested() if one.startswith("http")} == {own}


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    keys = ("--admin-api-key", "admin-key-1", "--api-key", "user-key-1", "--router-mode", "kv")
    with Cluster(tmp_path_factory.mktemp("keyed"), *keys) as cluster:
        cluster.wait_until(cluster.is_live, "the frontend did not start")
        for _ in range(2):
            cluster.mocker()
        with Browser(tmp_path_factory.mktemp("profile"), f"http://127.0.0.1:{cluster.port}") as found:
            yield found


def enter_key(browser: Browser, key: str) -> None:
    field = browser.until(lambda: browser.one("dialog[open] #key-input"), "the key is not requested")
    field.clear()
    field.send_keys(key, Keys.ENTER)


def test_admin_key_opens_the_console_and_drains_a_worker(keyed: Browser) -> None:
    keyed.driver.get(f"{keyed._url}/console/")
    enter_key(keyed, "admin-key-1")
    keyed.until(lambda: keyed.text("#status") == "Live", "the console did not open")
    keyed.named("Workers", "nav a").click()
    keyed.until(lambda: len(keyed.all("tbody tr")) == 2, "the workers are not listed")
    keyed.click("Drain")
    keyed.accept()
    keyed.until(lambda: "drained" in keyed.text("table"), "the worker is not drained")
    keyed.until(lambda: "Resume" in keyed.text("table"), "it cannot be resumed")
    keyed.click("Resume")
    keyed.until(
        lambda: "drained" not in keyed.text("table") and len(keyed.all("tbody tr")) == 2, "the worker was not resumed"
    )


def test_user_key_opens_the_playground_only(keyed: Browser) -> None:
    keyed.driver.execute_script("sessionStorage.clear()")
    keyed.driver.get("about:blank")
    keyed.driver.get(f"{keyed._url}/console/#/workers")
    enter_key(keyed, "user-key-1")
    keyed.until(lambda: "An admin key is needed" in keyed.text(), "the view is not refused")
    keyed.named("Playground", "nav a").click()
    keyed.until(lambda: keyed.one(f"#pg-model option[value={MODEL}]"), "no model is offered")
    assert Select(keyed.one("#pg-model")).first_selected_option.text == MODEL
    assert "$DYN_API_KEY" in keyed.text(".code")


def test_wrong_key_is_refused_with_its_reason(keyed: Browser) -> None:
    keyed.driver.execute_script("sessionStorage.clear()")
    keyed.driver.get("about:blank")
    keyed.driver.get(f"{keyed._url}/console/")
    enter_key(keyed, "wrong-key-1")
    keyed.until(lambda: "Incorrect API key" in keyed.text("#key-problem"), "the reason is not shown")
    assert all("401" in one for one in keyed.errors())
