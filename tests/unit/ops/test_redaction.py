"""Redaction of secrets, and of nothing else."""

import time

import pytest

from dynamo.ops.redaction import REDACTED, redacted_json, redacted_text, redacted_variables


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("NATS_SERVER=nats://user:pass1@host:4222", "pass1"),
        ("connect to https://me:pw@h/x?y=1", "pw@"),
        ("GET /v1?api_key=abcdef&n=1", "abcdef"),
        ("Authorization: Bearer abc.def-123456", "abc.def"),
        ("python -m dynamo.frontend --api-key s3cret --http-port 1", "s3cret"),
        ("python -m dynamo.frontend --api-key='s3 cret'", "s3 cret"),
        ('{"password": "hunter2"}', "hunter2"),
        ("DYN_API_KEYS=one,two", "one"),
        ("token hf_abcdefghijklmnopqrstuv in use", "hf_abc"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----", "MIIE"),
        ("seed SUACSSL3UAHUDXKFSNVUZRF5UHPMWZ6BFDTJ7M6USDXIEDNPPQYYYCU3VY", "SUACSSL3"),
    ],
)
def test_secret_is_removed(text: str, secret: str) -> None:
    assert secret not in redacted_text(text)
    assert REDACTED in redacted_text(text)


@pytest.mark.parametrize(
    "text",
    [
        "max_tokens: 64, input_tokens=10",
        "missing keys: [a, b]",
        "http://localhost:8000/v1/models",
        "--max-tokens 10 --kv-cache-block-size 16",
        "worker 12 sent 100 tokens in 0.5 s",
    ],
)
def test_text_without_secrets_is_unchanged(text: str) -> None:
    assert redacted_text(text) == text


def test_variables_are_redacted_by_name_and_by_content() -> None:
    given = {"HF_TOKEN": "x", "DYN_LOG": "info", "MY_URL": "http://a:b@c", "EMPTY_KEY": ""}
    assert redacted_variables(given) == {
        "DYN_LOG": "info",
        "EMPTY_KEY": "",
        "HF_TOKEN": REDACTED,
        "MY_URL": f"http://{REDACTED}@c",
    }


def test_json_is_redacted_at_any_depth_and_keeps_its_form() -> None:
    value = {"a": [{"api_key": "x", "n": 1}], "secrets": ["y"], "token": {"value": "nats://u:p@h"}}
    assert redacted_json(value) == {
        "a": [{"api_key": REDACTED, "n": 1}],
        "secrets": [REDACTED],
        "token": {"value": f"nats://{REDACTED}@h"},
    }


@pytest.mark.parametrize("part", ["a-", "x.", "://", "key", "--token", "Bearer "])
def test_long_lines_are_searched_in_linear_time(part: str) -> None:
    short, long = (timed(part * count) for count in (2_000, 20_000))
    assert long < 60 * max(short, 1e-3)


def timed(text: str) -> float:
    begun = time.process_time()
    redacted_text(text)
    return time.process_time() - begun
