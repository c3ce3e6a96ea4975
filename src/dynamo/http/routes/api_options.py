"""ApiOptions: the APIs that a frontend serves in addition to OpenAI's chats and completions, and their storage."""

from dataclasses import dataclass, field

from dynamo.api.batches.store import StorageLimits
from dynamo.api.responses.store import StoreLimits

MEMORY, NOWHERE = "memory", "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiOptions:
    """Settings of the optional APIs' routes."""

    enable_anthropic: bool = False
    strip_anthropic_preamble: bool = True
    """Whether to drop the billing line that some clients put before their system prompt."""
    responses_store: str = MEMORY
    """`memory`, `none` or a directory."""
    responses_limits: StoreLimits = field(default_factory=StoreLimits)
    batch_dir: str | None = None
    """Directory of files and batches; None disables both APIs."""
    batch_concurrency: int = 8
    """Maximum lines of all batches that run at a time while there are no client requests."""
    batch_limits: StorageLimits = field(default_factory=StorageLimits)
