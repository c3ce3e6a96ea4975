"""ApiOptions: the APIs that a frontend serves in addition to OpenAI's chats and completions, and their storage."""

from msgspec import Struct, field

from dynamo.api.batches.limits import StorageLimits
from dynamo.api.responses.store import StoreLimits

MEMORY, NOWHERE = "memory", "none"


class ApiOptions(Struct, frozen=True, kw_only=True):
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
