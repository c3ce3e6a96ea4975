"""Request template: defaults for fields that a request omits (`--request-template`).

The file is a JSON object with any of `model`, `temperature` and `max_completion_tokens`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from dynamo.core.codec import json_encode
from dynamo.core.errors import ConfigError

LIMITS = ("max_tokens", "max_completion_tokens")


class RequestTemplate(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """The defaults."""

    model: str | None = None
    temperature: float | None = None
    max_completion_tokens: int | None = None

    @classmethod
    def read(cls, path: str) -> "RequestTemplate":
        """Read the file. Raise `ConfigError`."""
        try:
            template = msgspec.json.decode(Path(path).read_bytes(), type=cls)
        except OSError as error:
            raise ConfigError(f"--request-template {path}: {error.strerror}") from None
        except msgspec.ValidationError as error:
            raise ConfigError(f"--request-template {path}: {error}") from None
        except msgspec.DecodeError as error:
            raise ConfigError(f"--request-template {path}: not valid JSON ({error})") from None
        if template.temperature is not None and not 0 <= template.temperature <= 2:
            raise ConfigError(f"--request-template {path}: temperature {template.temperature:g}: must be from 0 to 2")
        if template.max_completion_tokens is not None and template.max_completion_tokens < 1:
            raise ConfigError(f"--request-template {path}: max_completion_tokens must be 1 or more")
        return template

    def fill(self, body: bytes, limit: str) -> bytes:
        """Return the request with the defaults filled in. `limit` is the route's field for the maximum output tokens.

        A body that is not a JSON object is returned unchanged: the route reports the error.
        """
        try:
            request: Any = json.loads(body)
        except ValueError:
            return body
        if not isinstance(request, dict):
            return body
        missing = {name: value for name, value in self._defaults(request, limit).items() if request.get(name) is None}
        return json_encode({**request, **missing}) if missing else body

    def _defaults(self, request: Mapping[str, Any], limit: str) -> dict[str, Any]:
        known: dict[str, Any] = {"model": self.model, "temperature": self.temperature}
        if all(request.get(name) is None for name in LIMITS):
            known[limit] = self.max_completion_tokens
        return {name: value for name, value in known.items() if value is not None}
