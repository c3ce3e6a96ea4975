"""AisPerfConfig and ReasoningConfig: upstream's descriptions of an engine's speed and of a simulated reasoning phase."""

from collections.abc import Mapping
from typing import Any

from dynamo.core.errors import InvalidArgument


class AisPerfConfig:
    """Configuration of AISimulate: `backend`, `system`, `model`, `worker_type`, `tp` and its other keys."""

    def __init__(self, config: Any) -> None:
        """Copy a mapping, or the result of the object's `to_dict`. Raise `InvalidArgument` for another value."""
        values = config.to_dict() if hasattr(config, "to_dict") else config
        if not isinstance(values, Mapping):
            raise InvalidArgument(f"AisPerfConfig {config!r}: expected a mapping or an object with to_dict")
        self._values = dict(values)

    def to_dict(self) -> dict[str, Any]:
        """Return a copy of the configuration."""
        return dict(self._values)


class ReasoningConfig:
    """Reasoning of a mocker: the share `thinking_ratio` of the output is between the two tokens."""

    def __init__(self, start_thinking_token_id: int, end_thinking_token_id: int, thinking_ratio: float) -> None:
        for name, value in (("start", start_thinking_token_id), ("end", end_thinking_token_id)):
            if not 0 <= value < 1 << 32:
                raise OverflowError(f"{name}_thinking_token_id {value}: must be a 32-bit unsigned number")
        self._start, self._end, self._ratio = start_thinking_token_id, end_thinking_token_id, float(thinking_ratio)

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration in the form of the mocker's engine arguments."""
        return {
            "start_thinking_token_id": self._start,
            "end_thinking_token_id": self._end,
            "thinking_ratio": self._ratio,
        }
