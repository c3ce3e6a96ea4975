"""Redaction: removal of secrets from environments, URLs, command lines and log lines. Pure."""

import re
from collections.abc import Mapping

REDACTED = "[redacted]"
SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|NKEY|AUTHORIZATION", re.IGNORECASE)
"""Names of variables and fields whose values are secret."""

_NAME = r"[\w.-]{0,64}(?:KEYS?|TOKENS?|SECRETS?|PASSWORDS?|PASSWD|CREDENTIALS?)"
"""Names are bounded, so that lines of any length are searched in linear time."""
_URL_CREDENTIALS = re.compile(r"(?<=://)[^/\s@\"']{1,512}@")
_URL_PARAMETER = re.compile(rf"([?&]{_NAME}=)[^&\s\"']+", re.IGNORECASE)
_ASSIGNMENT = re.compile(
    rf"\b({_NAME}[\"']?\s*[=:]\s*)(\"[^\"\n]*\"|'[^'\n]*'|[^\s,;}}\]\"'{{\[(][^\s,;}}\]\"']*)", re.IGNORECASE
)
_FLAG = re.compile(rf"(--{_NAME})([ =]+)(\"[^\"\n]*\"|'[^'\n]*'|\S+)", re.IGNORECASE)
_BEARER = re.compile(r"\b(Bearer|Basic)\s+[\w.~+/=-]{6,}", re.IGNORECASE)
_WELL_KNOWN = re.compile(r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|nvapi-[A-Za-z0-9_-]{16,}|AKIA[A-Z0-9]{16})\b")
"""Tokens that are recognised without a name: Hugging Face, OpenAI, NVIDIA, AWS."""
_PEM = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)
_SEED = re.compile(r"\bS[UOANCX][A-Z2-7]{56}\b")
"""Seeds of NATS keys."""
_COUNTED = re.compile(r"\d+(?:\.\d+)?|true|false|null|none", re.IGNORECASE)
"""Values that are no secrets: `max_tokens: 64`, `output_tokens=10`."""


def redacted_text(text: str) -> str:
    """Return a text without credentials of URLs, bearer tokens, private keys and values of secret names."""
    text = _PEM.sub(REDACTED, text)
    text = _URL_CREDENTIALS.sub(f"{REDACTED}@", text)
    text = _URL_PARAMETER.sub(rf"\1{REDACTED}", text)
    text = _BEARER.sub(rf"\1 {REDACTED}", text)
    text = _FLAG.sub(_without_flag_value, text)
    text = _ASSIGNMENT.sub(_without_value, text)
    return _SEED.sub(REDACTED, _WELL_KNOWN.sub(REDACTED, text))


def redacted_value(name: str, value: str) -> str:
    """Return the value of a variable or field, redacted by its name and by its content."""
    return REDACTED if value and SECRET_NAME.search(name) else redacted_text(value)


def redacted_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without secrets, sorted by name."""
    return {name: redacted_value(name, value) for name, value in sorted(variables.items())}


def redacted_json(value: object, name: str = "") -> object:
    """Return a JSON value without the texts of secret fields, at any depth; `name` is the field that holds it."""
    if isinstance(value, dict):
        return {key: redacted_json(one, str(key)) for key, one in value.items()}
    if isinstance(value, list):
        return [redacted_json(one, name) for one in value]
    return redacted_value(name, value) if isinstance(value, str) else value


def _without_value(found: re.Match[str]) -> str:
    return found[0] if _is_public(found[2]) else f"{found[1]}{REDACTED}"


def _without_flag_value(found: re.Match[str]) -> str:
    return found[0] if _is_public(found[3]) else f"{found[1]}{found[2]}{REDACTED}"


def _is_public(value: str) -> bool:
    return REDACTED in value or _COUNTED.fullmatch(value.strip("\"'")) is not None
