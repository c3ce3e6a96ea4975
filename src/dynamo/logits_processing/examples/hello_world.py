"""A logits processor that forces one fixed response."""

from typing import Any

from dynamo.logits_processing.examples.forced_sequence import ForcedSequenceLogitsProcessor

RESPONSE = "Hello world!"


class HelloWorldLogitsProcessor(ForcedSequenceLogitsProcessor):
    """Processor that makes every response `Hello world!`."""

    def __init__(self, tokenizer: Any) -> None:
        if tokenizer.eos_token_id is None:
            raise ValueError("HelloWorldLogitsProcessor requires a tokenizer with eos_token_id")
        super().__init__(tokenizer.encode(RESPONSE, add_special_tokens=False), tokenizer.eos_token_id)
