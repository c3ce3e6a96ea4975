"""Command line `python -m dynamo.openai_proxy`: a running server as a worker, or as one for each of its models."""

import asyncio
import sys
from collections.abc import Sequence

from dynamo.backend.config import UNSUPPORTED_WORKER_FLAGS
from dynamo.backend.engine import LLMEngine
from dynamo.backend.process import run_worker
from dynamo.core import logging as log
from dynamo.core.config import exit_on_config_error
from dynamo.core.unsupported_flags import load
from dynamo.openai_proxy.config import ProxyConfig
from dynamo.openai_proxy.facts import ModelOffer, find_offers
from dynamo.openai_proxy.text_engine import TextEngine
from dynamo.openai_proxy.token_engine import TokenEngine

PROG = "python -m dynamo.openai_proxy"
INTERRUPTED = 130  # The exit status that a shell reports for SIGINT.


def main(argv: Sequence[str] | None = None) -> int:
    """Run the worker until it is stopped; return the exit status."""
    config = load(ProxyConfig, sys.argv[1:] if argv is None else argv, UNSUPPORTED_WORKER_FLAGS, prog=PROG)
    log.setup(component="worker")
    try:
        facts, offers = asyncio.run(find_offers(config))
    except KeyboardInterrupt:  # Nothing is served yet, so there is nothing to drain.
        return INTERRUPTED
    left = iter(offers)

    def make() -> LLMEngine:
        offer: ModelOffer = next(left)
        return TextEngine(config, facts, offer) if config.takes_text else TokenEngine(config, facts, offer)

    return run_worker(config, make, count=len(offers))


if __name__ == "__main__":
    exit_on_config_error(main)
