"""Helpers of chat processors."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from dynamo.core.errors import InvalidArgument
from dynamo.frontend import utils


def test_one_constraint_is_returned_with_its_whitespace_pattern() -> None:
    assert utils.legacy_guided_decoding({}) is None
    assert utils.legacy_guided_decoding({"guided_choice": []}) is None
    request = {"guided_regex": "a+", "guided_whitespace_pattern": " "}
    assert utils.legacy_guided_decoding(request) == {"regex": "a+", "whitespace_pattern": " "}


@pytest.mark.parametrize(
    ("request_fields", "message"),
    [
        ({"guided_json": {}, "guided_regex": "a"}, "received: json, regex"),
        ({"guided_choice": "a"}, "guided_choice must be a list"),
    ],
)
def test_two_constraints_or_non_list_choices_are_rejected(request_fields: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        utils.validate_legacy_guided_decoding_constraints(request_fields)


def test_chat_template_is_read_from_its_file(tmp_path: Path) -> None:
    assert utils.resolve_chat_template(str(tmp_path)) is None
    wrapped = tmp_path / "chat_template.json"
    wrapped.write_text("{")
    with pytest.raises(ValueError, match=r"Malformed JSON in .*chat_template\.json"):
        utils.resolve_chat_template(str(tmp_path))
    wrapped.write_text(json.dumps({"chat_template": "wrapped"}))
    assert utils.resolve_chat_template(str(tmp_path)) == "wrapped"
    (tmp_path / "chat_template.jinja").write_text("own\\n\n")
    assert utils.resolve_chat_template(str(tmp_path)) == "own\\n\n"
    assert utils.resolve_chat_template(str(tmp_path), backend="sglang") == "own\n"


def test_ids_have_16_hexadecimal_digits() -> None:
    assert len(utils.random_uuid()) == 16
    assert utils.random_call_id().startswith("call_")
    assert utils.worker_warmup()


def test_extra_response_fields_are_read_from_nvext() -> None:
    assert utils.nvext_extra_field_requested({"nvext": {"extra_fields": ["timing"]}}, "timing")
    assert not utils.nvext_extra_field_requested({"nvext": {"extra_fields": "timing"}}, "timing")
    assert not utils.nvext_extra_field_requested({}, "timing")


def message(*parts: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": list(parts)}


def test_media_are_extracted_in_order_with_their_cache_ids() -> None:
    image = {"type": "image_url", "image_url": {"url": "http://a"}, "uuid": "one"}
    cached = {"type": "image_url", "image_url": None, "uuid": "two"}
    video = {"type": "video_url", "video_url": {"url": "http://v"}}
    found = utils.extract_mm_urls([message("text", image, {"type": "text"}, cached), message(video, role="tool")])
    assert found == (
        {"image_url": [{"Url": "http://a"}, {"UuidOnly": "two"}], "video_url": [{"Url": "http://v"}]},
        {"image_url": ["one", "two"], "video_url": [None]},
    )
    assert utils.extract_mm_urls([message(video)]) == ({"video_url": [{"Url": "http://v"}]}, None)
    assert utils.extract_mm_urls([message(image, role="assistant"), {"role": "user", "content": "text"}, 7]) == (
        None,
        None,
    )


@pytest.mark.parametrize(
    ("part", "named"),
    [
        ({"type": "image_url", "image_url": {}}, "URL or uuid"),
        ({"type": "image_url", "image_url": {"url": "http://a"}, "uuid": ""}, "non-empty string"),
        ({"type": "audio_url", "uuid": "one"}, "media modality `audio_url`"),
    ],
)
def test_media_without_a_reference_are_rejected(part: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        utils.extract_mm_urls([message(part)])


def test_engine_responses_without_tokens_are_errors() -> None:
    logger = logging.getLogger("test.frontend.utils")
    failed = utils.handle_engine_error({"status": "error", "message": "no memory"}, "r", logger)
    assert failed == {"error": {"message": "no memory", "type": "backend_error"}}
    unreadable = utils.handle_engine_error(None, "r", logger)
    assert unreadable["error"] == {"message": "Invalid engine response for request r", "type": "internal_error"}
    assert utils.make_internal_error("r", "why")["error"]["message"] == "why"
    assert utils.make_backend_error({})["error"]["message"] == "unknown backend error"
    assert utils.as_error_envelope(failed) == {"_dynamo_annotated": True, "event": "error", "comment": ["no memory"]}


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ('Unknown: BackendInvalidArgument: {"message": "no", "code": 415}', (415, "no")),
        ('BackendInvalidArgument: {"message": "no", "code": true}', (400, "no")),
        ("BackendInvalidArgument: no", (400, "no")),
        ('BackendInvalidArgument: {"message": "no", "code": 99}', None),
        ('{"message": "no", "code": 400}', None),
    ],
)
def test_worker_rejection_keeps_its_status(text: str, status: tuple[int, str] | None) -> None:
    error = utils.backend_invalid_argument_to_http_error(ValueError(text))
    assert (None if error is None else (error.code, error.message)) == status
