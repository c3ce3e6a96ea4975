"""Upstream's host of a KV state agent: its constructor names what is absent."""

from dynamo.runtime.component import Endpoint

AGENT = (
    "is not supported by this release; run the agent of released Dynamo 1.6.1, or let workers serve their own KV state"
)


class KvStateAgentHost:
    """Host of the KV state of workers on the same machine."""

    def __init__(self, endpoint: Endpoint, max_slots: int = 8) -> None:
        raise RuntimeError(f"KvStateAgentHost {AGENT}")
