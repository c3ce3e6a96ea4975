"""The token limit of an engine, in runtime data."""

import json
from dataclasses import asdict, dataclass
from typing import Any

TOKEN_BUDGET_RUNTIME_KEY = "token_budget"  # noqa: S105 -- a key of runtime data


@dataclass(frozen=True)
class TokenBudget:
    """Limit of prompt and output tokens together, and what exceeds it is rejected."""

    combined_limit: int
    reject_prompt_overflow: bool
    reject_total_overflow: bool

    def __post_init__(self) -> None:
        if self.combined_limit < 0:
            raise ValueError(f"combined_limit {self.combined_limit}: must be non-negative")


def publish_token_budget(runtime_config: Any, token_budget: TokenBudget) -> None:
    """Set the limit on a `ModelRuntimeConfig`."""
    runtime_config.set_engine_specific(TOKEN_BUDGET_RUNTIME_KEY, json.dumps(asdict(token_budget)))
