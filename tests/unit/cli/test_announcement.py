"""Announcement: a line that works when pasted, and no false promise."""

import json
import shlex

import pytest

from dynamo.cli.announcement import Announcement, Api, reachable


def announcement(**changes: object) -> Announcement:
    values: dict[str, object] = {
        "engine": "cpu",
        "workers": 1,
        "is_demo": False,
        "host": "0.0.0.0",
        "port": 8000,
        "command": "dynamo",
    }
    return Announcement(**(values | changes))  # type: ignore[arg-type]


def body_of(line: str) -> dict[str, object]:
    words = shlex.split(line)
    return dict(json.loads(words[words.index("-d") + 1]))


def test_curl_example_is_one_line_with_valid_shell_quoting() -> None:
    line = announcement(port=9001).curl("it's a model")
    words = shlex.split(line)
    assert "\n" not in line
    assert words[:3] == ["curl", "-N", "http://localhost:9001/v1/chat/completions"]
    assert body_of(line)["model"] == "it's a model"
    assert body_of(line)["stream"] is True


def test_example_commands_for_the_mocker_set_max_tokens() -> None:
    assert "max_tokens" in body_of(announcement(engine="mocker").curl("m"))
    assert "max_tokens" not in body_of(announcement().curl("m"))
    assert announcement(engine="mocker").chat().endswith("--max-tokens 64")


def test_announcement_labels_demo_models_and_mockers_only() -> None:
    assert "demo model: tiny" in announcement(is_demo=True).ready("demo", 1.0)
    assert "random tokens" in announcement(engine="mocker", is_demo=True).ready("demo", 1.0)
    for word in ("demo", "random"):
        assert word not in announcement().ready("llama", 1.0)


def test_ready_message_contains_time_model_address_and_stop_key() -> None:
    text = announcement(workers=2, port=9).ready("llama", 1.234)
    assert text.splitlines()[0] == "Ready in 1.2 s: llama (cpu, 2 workers) at http://localhost:9"
    assert "Ctrl-C" in text


def test_banner_names_the_api_reference_and_the_listen_address() -> None:
    assert "API reference: http://localhost:8000/docs (listening on 0.0.0.0:8000)" in announcement().ready("m", 1.0)
    assert "(listening on [::]:8000)" in announcement(host="::").ready("m", 1.0)


@pytest.mark.parametrize(
    ("api", "field"), [(Api.COMPLETIONS, "prompt"), (Api.EMBEDDINGS, "input"), (Api.CLASSIFY, "input")]
)
def test_model_without_chat_has_an_example_for_its_own_api(api: Api, field: str) -> None:
    one = announcement(api=api)
    text = one.ready("m", 1.0)
    assert "dynamo chat" not in text
    assert f"http://localhost:8000{api.value} " in text
    assert set(body_of(one.curl("m"))) - {"stream"} == {"model", field}


def test_chat_example_omits_the_default_url() -> None:
    assert announcement().chat() == "dynamo chat"
    assert announcement(port=1).chat() == "dynamo chat --url http://localhost:1"


def test_tls_changes_the_url_and_curl_options_of_the_example() -> None:
    line = announcement(is_tls=True).curl("m")
    assert line.startswith("curl -kN https://localhost:8000/")
    assert announcement(is_tls=True).chat() == "dynamo chat --url https://localhost:8000"


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("0.0.0.0", "localhost"),
        ("::", "localhost"),
        ("127.0.0.1", "localhost"),
        ("10.0.0.7", "10.0.0.7"),
        ("fd00::1", "[fd00::1]"),
        ("box.example", "box.example"),
    ],
)
def test_listen_address_is_converted_to_a_reachable_address(host: str, name: str) -> None:
    assert reachable(host) == name


def test_serve_prints_a_one_line_warning_when_reachable_from_the_network() -> None:
    warning = "Warning: every host that reaches 0.0.0.0 can use it; require a key with --api-key or DYN_API_KEYS."
    assert warning in announcement().ready("m", 1.0).splitlines()
    assert "Warning" not in announcement(host="127.0.0.1").ready("m", 1.0)
    assert "Warning" not in announcement(needs_key=True).ready("m", 1.0)


def test_curl_example_reads_the_api_key_from_the_environment() -> None:
    assert '-H "Authorization: Bearer $DYN_API_KEY"' in announcement(needs_key=True).curl("m")
    assert "Authorization" not in announcement().curl("m")
