"""Choices of `--tokenizer`, and the names of the encoders for each, without the encoders themselves."""

import logging

from dynamo.core.errors import ConfigError

logger = logging.getLogger(__name__)

BACKEND_NAMES = ("compiled", "fastokens", "words")
"""Names of the encoders that are faster than the library, best first (`tokenizer.BACKENDS`)."""

CHOICES = ("default", "fastokens", "basetenkenizer")
"""Values of `--tokenizer`. `default`: the fastest encoder that passes the self-test. The others are libraries; if
one is missing or does not support a model's tokenizer, the default is used if allowed. `basetenkenizer` does not exist
for Python."""


def backends_wanted(choice: str, *, falls_back: bool = True) -> tuple[str, ...]:
    """Return the backends to try for one of `CHOICES`; the first that agrees is used. Raise `ConfigError`."""
    if choice not in CHOICES:
        raise ConfigError(f"--tokenizer {choice}: must be one of {', '.join(CHOICES)}")
    if choice == "default" or (falls_back and choice in BACKEND_NAMES):
        return tuple(sorted(BACKEND_NAMES, key=lambda name: name != choice))
    if choice in BACKEND_NAMES:
        return (choice,)
    if not falls_back:
        raise ConfigError(f"--tokenizer {choice}: this library does not exist for Python")
    logger.warning("--tokenizer %s: this library does not exist for Python; the default is used", choice)
    return BACKEND_NAMES
