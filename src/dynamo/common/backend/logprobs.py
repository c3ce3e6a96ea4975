"""Log probabilities: request options, and conversion from the outputs of vLLM, TensorRT-LLM and SGLang.

A chunk has `log_probs`, one number per token, and `top_logprobs`, per token a list of
`{"rank", "token_id", "token", "logprob"}`, with `bytes` on request.
"""

import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

logger = logging.getLogger(__name__)

LogProbs = tuple[list[float] | None, list[list[dict[str, Any]]] | None]
PromptLogProbs = list[dict[str, dict[str, Any]] | None]


def parse_logprob_options(output_options: dict[str, Any]) -> tuple[int | None, int | None]:
    """Return `logprobs` and `prompt_logprobs`; None for an absent one, and for an invalid one, with a warning."""
    logprobs, prompt_logprobs = (_count(output_options, name) for name in ("logprobs", "prompt_logprobs"))
    return logprobs, prompt_logprobs


def _count(options: Mapping[str, Any], name: str) -> int | None:
    value = options.get(name)
    if value in (None, ""):
        return None
    with contextlib.suppress(TypeError, ValueError):
        if (count := int(value)) >= 0:
            return count
    logger.warning("ignored %s=%r: must be an integer of 0 or more", name, value)
    return None


def extract_from_completion_output(
    output: Any,
    num_output_tokens_so_far: int,
    tokenizer: Any = None,
    *,
    fallback_to_first_on_missing: bool = False,
    include_bytes: bool = False,
) -> LogProbs:
    """Return the log probabilities of the tokens after the first `num_output_tokens_so_far` of vLLM or TensorRT-LLM.

    `fallback_to_first_on_missing` uses the first alternative where the generated token is missing. Return (None, None)
    if any token has none: positions must match those of the tokens.
    """
    everything = getattr(output, "logprobs", None)
    if not everything:
        return None, None
    token_ids = list(output.token_ids or ())[num_output_tokens_so_far:]
    positions = list(everything)[num_output_tokens_so_far:]
    if not token_ids or not positions:
        return None, None
    if isinstance(positions[0], float):  # TensorRT-LLM without alternatives.
        return [float(value) for value in positions], None
    log_probs: list[float] = []
    top_logprobs: list[list[dict[str, Any]]] = []
    for token_id, position in zip(token_ids, positions, strict=False):
        chosen = None if position is None else position.get(token_id)
        if chosen is None and position and fallback_to_first_on_missing:
            chosen = next(iter(position.values()))
        if chosen is None:
            return None, None
        log_probs.append(float(chosen.logprob))
        top_logprobs.append(
            [_alternative(one, info, tokenizer, include_bytes=include_bytes) for one, info in position.items()]
        )
    return log_probs, top_logprobs


def _alternative(token_id: int, info: Any, tokenizer: Any, *, include_bytes: bool) -> dict[str, Any]:
    token = _text(token_id, info, tokenizer)
    found = {
        "rank": getattr(info, "rank", 0),
        "token_id": token_id,
        "token": token,
        "logprob": float(info.logprob),
    }
    if include_bytes:
        found["bytes"] = list(token.encode()) if token else None
    return found


def _text(token_id: int, info: Any, tokenizer: Any) -> str | None:
    """Return the token's text from the engine, else from the tokenizer; None if neither has it."""
    text: str | None = getattr(info, "decoded_token", None)
    if text or tokenizer is None:
        return text
    try:
        decoded: str = tokenizer.decode([token_id])
    except (
        ValueError,
        TypeError,
        LookupError,
        OverflowError,
        RuntimeError,
    ) as error:  # Libraries differ; the number remains.
        logger.debug("cannot decode token %d: %s", token_id, error)
        return None
    return decoded


def extract_prompt_logprobs_from_completion_output(output: Any, tokenizer: Any = None) -> PromptLogProbs | None:
    """Return the log probabilities of the prompt of vLLM or TensorRT-LLM by token id; None if there are none.

    A position without log probability, such as the first one, is None.
    """
    positions = getattr(output, "prompt_logprobs", None)
    if not positions:
        return None
    return [
        None
        if position is None
        else {str(token_id): _prompt_entry(token_id, info, tokenizer) for token_id, info in position.items()}
        for position in positions
    ]


def _prompt_entry(token_id: int, info: Any, tokenizer: Any) -> dict[str, Any]:
    more = {"rank": getattr(info, "rank", None), "decoded_token": _text(token_id, info, tokenizer)}
    return {"logprob": float(info.logprob), **{name: value for name, value in more.items() if value is not None}}


def build_sglang_logprob_kwargs(output_options: dict[str, Any]) -> dict[str, Any]:
    """Return SGLang's arguments for the requested log probabilities."""
    logprobs, prompt_logprobs = parse_logprob_options(output_options)
    wanted = [count for count in (logprobs, prompt_logprobs) if count is not None]
    if not wanted:
        return {}
    arguments: dict[str, Any] = {"return_logprob": True, "top_logprobs_num": max(wanted)}
    if prompt_logprobs is not None:
        arguments["logprob_start_len"] = 0
    return arguments


def extract_from_sglang_meta(meta_info: dict[str, Any], *, return_tokens_as_token_ids: bool = False) -> LogProbs:
    """Return the log probabilities of a chunk's tokens from SGLang's `meta_info`.

    `return_tokens_as_token_ids` gives tokens as `token_id:<id>` instead of their text.
    """
    chosen = meta_info.get("output_token_logprobs")
    if not chosen:
        return None, None
    top = meta_info.get("output_top_logprobs")
    return [float(entry[0]) for entry in chosen], [
        _ranked(position or (), as_ids=return_tokens_as_token_ids) for position in top
    ] if top else None


def _ranked(position: Sequence[Sequence[Any]], *, as_ids: bool) -> list[dict[str, Any]]:
    return [
        {
            "rank": rank,
            "token_id": token_id,
            "token": f"token_id:{token_id}" if as_ids else text,
            "logprob": float(logprob),
        }
        for rank, (logprob, token_id, text) in enumerate(position, 1)
    ]


def extract_prompt_logprobs_from_sglang_meta(meta: dict[str, Any]) -> PromptLogProbs | None:
    """Return the log probabilities of the prompt from SGLang's `meta_info` by token id; None if there are none."""
    chosen = meta.get("input_token_logprobs")
    if not chosen:
        return None
    top = meta.get("input_top_logprobs") or []
    found: PromptLogProbs = []
    for number, entry in enumerate(chosen):
        if entry[0] is None:
            found.append(None)
            continue
        alternatives = (top[number] if number < len(top) else None) or ()
        found.append({str(one[1]): _sglang_entry(one) for one in (entry, *alternatives)})
    return found


def _sglang_entry(entry: Sequence[Any]) -> dict[str, Any]:
    logprob, _, text = entry
    return {"logprob": float(logprob), **({} if text is None else {"decoded_token": text})}
