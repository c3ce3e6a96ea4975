"""Request fields that all engine adapters convert in the same way. Pure."""

import re
from typing import Any

import msgspec

from dynamo.core.errors import InvalidArgument
from dynamo.protocols.engine import PreprocessedRequest, SamplingOptions, resumed_of

TO_ENGINE = "sampling_options"
"""Key in `extra_args` of sampling options that have no field in the protocol."""

PARAMETERS = {
    **{
        name: name
        for name in (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "best_of",
            "seed",
            "max_tokens",
            "min_tokens",
            "stop",
            "stop_token_ids",
            "logprobs",
            "top_logprobs",
            "prompt_logprobs",
            "logit_bias",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
            "bad_words",
            "ignore_eos",
            "dimensions",
            "mm_processor_kwargs",
        )
    },
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "top_logprobs_num": "top_logprobs",
    "random_seed": "seed",
    "json_schema": "response_format",
    "structural_tag": "response_format",
    "regex": "response_format",
    "ebnf": "response_format",
    "grammar": "response_format",
    "input_ids": "prompt",
    "prompt_token_ids": "prompt",
}
"""Sampling parameter names in engines' validation messages, and the request fields they come from."""
COMMON_SAMPLING = (
    "n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "top_k", "min_p",
)  # fmt: skip
"""Sampling options that vLLM, SGLang and TensorRT-LLM name as the protocol does."""
_NAMED = re.compile(r"\b(?:" + "|".join(sorted(PARAMETERS, key=len, reverse=True)) + r")\b")


def refusal_of(error: BaseException, *kinds: type[BaseException]) -> InvalidArgument | None:
    """Return the client's error where an engine's `ValueError` names a parameter of the request, else None.

    Engines raise `ValueError`, and `kinds`, for their own faults as well, which are not the client's.
    """
    if type(error) not in (kinds or (ValueError,)):
        return None
    message = str(error)
    found = _NAMED.search(message)
    return None if found is None else InvalidArgument(message, param=PARAMETERS[found[0]])


def common_sampling(options: SamplingOptions) -> dict[str, Any]:
    """Return the options that engines name alike; None for those that are not set."""
    return {name: getattr(options, name) for name in COMMON_SAMPLING}


def check_prompt(request: PreprocessedRequest, context_length: int) -> None:
    """Raise `InvalidArgument` for an empty prompt, or one that leaves no space for output tokens."""
    count = len(request.token_ids)
    if not count:
        raise InvalidArgument("the prompt is empty", param="prompt")
    if count >= context_length:
        raise InvalidArgument(
            f"the prompt has {count} tokens; with at least one token of output it must fit into the model's "
            f"context of {context_length}",
            param="prompt",
        )


def own_options(request: PreprocessedRequest) -> dict[str, Any]:
    """Return the sampling options that have no field in the protocol."""
    extra = {} if request.extra_args is msgspec.UNSET else request.extra_args
    return extra.get(TO_ENGINE) or {}


def ends_of(request: PreprocessedRequest) -> list[int]:
    """Return the tokens that end a response, in order."""
    stop = request.stop_conditions
    ends = {*(stop.stop_token_ids or ()), *(stop.stop_token_ids_visible or ()), *(stop.stop_token_ids_hidden or ())}
    if not stop.ignore_eos:
        ends.update(request.eos_token_ids)
    return sorted(ends)


def thinking_budget(request: PreprocessedRequest) -> int | None:
    """Return the thinking budget for engines that count reasoning tokens at the end of a prompt too, like vLLM."""
    left = request.stop_conditions.max_thinking_tokens
    return None if left is None else left + resumed_of(request).thinking_tokens


def hidden_ends_of(request: PreprocessedRequest) -> frozenset[int]:
    """Return the end tokens that are not part of the output text."""
    stop = request.stop_conditions
    return frozenset({*(stop.stop_token_ids_hidden or ()), *(() if stop.ignore_eos else request.eos_token_ids)})


def rank_of(wanted: int | None, ranks: int, first_rank: int) -> int | None:
    """Return the requested rank of this worker, counted from 0; None if there is no choice.

    Raise `InvalidArgument` for a rank of another worker.
    """
    if wanted is None:
        return None
    here = wanted - first_rank
    if not 0 <= here < ranks:
        last = first_rank + ranks - 1
        raise InvalidArgument(f"dp_rank {wanted}: this worker has {first_rank} to {last}", param="dp_rank")
    return here if ranks > 1 else None


def token_biases(given: Any) -> dict[int, float]:
    """Return `logit_bias` by token id. Raise `InvalidArgument`."""
    try:
        return {int(token): float(value) for token, value in given.items()}
    except (AttributeError, TypeError, ValueError):
        raise InvalidArgument("logit_bias must map token ids to numbers", param="logit_bias") from None


def json_text(value: Any) -> str | None:
    """Return a schema or structural tag as a JSON string for engines."""
    if value is None or isinstance(value, str):
        return value
    return msgspec.json.encode(value).decode()


def media_of(request: PreprocessedRequest) -> dict[str, list[str]]:
    """Return the URLs of the prompt's media by kind. Raise `InvalidArgument` for media without a URL."""
    if not request.multi_modal_data:
        return {}
    found: dict[str, list[str]] = {}
    for kind, items in request.multi_modal_data.items():
        for item in items:
            if "Url" not in item:
                raise InvalidArgument(f"{kind}: expected a URL, got {', '.join(item)}", param="messages")
            found.setdefault(kind, []).append(item["Url"])
    return found
