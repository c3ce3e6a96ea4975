"""ApiOptions: which APIs a frontend speaks beside OpenAI's chats and completions, and what it keeps for them."""

from dataclasses import dataclass, field

from dynamo.api.batches.store import StorageLimits
from dynamo.api.responses.store import StoreLimits

MEMORY, NOWHERE = "memory", "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiOptions:
    """What the routes of these APIs are told."""

    enable_anthropic: bool = False
    strip_anthropic_preamble: bool = True
    """Whether the billing line that some clients put before their system prompt is left out."""
    responses_store: str = MEMORY
    """`memory`, `none` or a directory."""
    responses_limits: StoreLimits = field(default_factory=StoreLimits)
    batch_dir: str | None = None
    """Where files and batches are; None: there are none."""
    batch_concurrency: int = 8
    """Lines of all batches that are asked at a time, while no client asks anything."""
    batch_limits: StorageLimits = field(default_factory=StorageLimits)
