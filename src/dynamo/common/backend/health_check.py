"""Requests of health checks."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dynamo.health_check import HEALTH_CHECK_KEY, load_health_check_from_env

__all__ = [
    "HEALTH_CHECK_KEY",
    "bos_token_id_or",
    "build_health_check_payload",
    "build_raw_health_check_payload",
    "is_probe",
    "parse_health_check_payload_cli",
]

logger = logging.getLogger(__name__)


def is_probe(request: Mapping[str, Any]) -> bool:
    """Return whether the request is a health check."""
    return request.get(HEALTH_CHECK_KEY) is True


def bos_token_id_or(tokenizer: Any, default: int = 1) -> int:
    """Return the `bos_token_id` of a tokenizer or of the one that it wraps; `default` if there is none."""
    for one in (tokenizer, getattr(tokenizer, "tokenizer", None)):
        token_id = getattr(one, "bos_token_id", None)
        if token_id is not None:
            return int(token_id)
    return default


def build_health_check_payload(bos_token_id: int, *, extras: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a request of one token with one greedy output token, updated by `extras`.

    `DYN_HEALTH_CHECK_PAYLOAD` replaces it.
    """
    return build_raw_health_check_payload(
        {
            "token_ids": [bos_token_id],
            "stop_conditions": {"max_tokens": 1, "ignore_eos": True},
            "sampling_options": {"temperature": 0.0},
            **(extras or {}),
        }
    )


def build_raw_health_check_payload(payload: dict[str, Any]) -> dict[str, Any]:
    """Return the payload, or that of `DYN_HEALTH_CHECK_PAYLOAD`, marked as a health check."""
    override = load_health_check_from_env()
    return _marked(payload if override is None else override)


def parse_health_check_payload_cli(value: str | None) -> dict[str, Any] | None:
    """Return the payload in a flag, JSON or `@FILE`, marked as a health check; None, with a warning, if it is invalid."""
    if not value:
        return None
    try:
        payload = json.loads(Path(value[1:]).read_text(encoding="utf-8") if value.startswith("@") else value)
    except (OSError, ValueError) as error:
        logger.warning("--health-check-payload %s: %s", value, error)
        return None
    if not isinstance(payload, dict):
        logger.warning("--health-check-payload %s: must be a JSON object", value)
        return None
    return _marked(payload)


def _marked(payload: dict[str, Any]) -> dict[str, Any]:
    return {**payload, HEALTH_CHECK_KEY: True}
