"""Shown choices: selection of the choices to show, echo, and the log-probabilities of the prompt."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from dynamo.core.errors import InvalidArgument, Unknown
from dynamo.protocols.engine import PreprocessedRequest
from dynamo.protocols.openai import CommonRequest, CompletionRequest
from dynamo.protocols.openai_ranges import TEXT_VARIABLE, refuse_count, request_bounds
from dynamo.serving.answers import all_choices
from dynamo.serving.choice import Choice
from dynamo.serving.generation import Generation
from dynamo.serving.postprocessor import TokenEntry
from dynamo.serving.served_model import ServedModel

ECHO_TOKENS_INLINE = 4096  # Decoded within about a millisecond.
LOGPROB_MIN = -9999.0
"""Logprob of an impossible token, as reported by vLLM: JSON has no infinity."""

PromptRow = dict[int, tuple[float, int | None]] | None
"""Logprob and rank of a prompt token and of its most likely alternatives, by token id; None for the first token."""


def prompt_row(reported: Any) -> PromptRow:
    """Parse one entry of `prompt_logprobs` in vLLM's form. Raise `Unknown` for anything else."""
    if reported is None:
        return None
    try:
        return {int(token): (_finite(found["logprob"]), found.get("rank")) for token, found in reported.items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise Unknown(f"the worker's prompt_logprobs cannot be read: {str(reported)[:200]}") from None


def _finite(logprob: float | None) -> float:
    """Return a finite logprob: JSON transports an infinite one as null."""
    return LOGPROB_MIN if logprob is None else max(LOGPROB_MIN, float(logprob))


def add_prompt_logprobs(request: CommonRequest, generations: Sequence[Generation]) -> None:
    """Add prompt log-probabilities to the choices if requested. Raise `InvalidArgument` if a worker reports none."""
    if request.prompt_logprobs is None:
        return
    for generation in generations:
        found = prompt_logprobs(generation, request.prompt_logprobs)
        for choice in generation.choices:
            choice.show_prompt_logprobs(found)


def chat_finisher(request: CommonRequest) -> Callable[[Sequence[Generation]], list[Choice]]:
    """Return the function that selects a chat's choices from the generations."""

    def finish(generations: Sequence[Generation]) -> list[Choice]:
        add_prompt_logprobs(request, generations)
        return all_choices(generations)

    return finish


def finisher_of(request: CompletionRequest) -> Callable[[Sequence[Generation]], list[Choice]]:
    """Return the function that selects a text completion's choices from the generations."""
    count = request.n or 1

    def finish(generations: Sequence[Generation]) -> list[Choice]:
        shown = all_choices(generations)
        add_prompt_logprobs(request, generations)
        if (request.best_of or 1) > count:
            shown = [
                choice
                for place, generation in enumerate(generations)
                for choice in best_choices(generation.choices, count, place * count)
            ]
        for choice in shown:
            if request.logprobs is None:
                choice.hide_entries()
        if request.echo and request.logprobs is not None:
            for generation in generations:
                before = prompt_entries(generation)
                for choice in generation.choices:
                    choice.precede_entries(before)
        return shown

    return finish


async def echoes_of(
    model: ServedModel, request: CompletionRequest, prepared: Sequence[PreprocessedRequest]
) -> list[str]:
    """Return the prompts as `echo` repeats them, decoded in a thread if they are long; none without `echo`.

    Raise `InvalidArgument` if the choices would repeat too much text.
    """
    if not request.echo:
        return []
    tokens = sum(len(one.token_ids) for one in prepared)
    if tokens > ECHO_TOKENS_INLINE:
        return await asyncio.to_thread(_echoes, model, request, prepared)
    return _echoes(model, request, prepared)


def _echoes(model: ServedModel, request: CompletionRequest, prepared: Sequence[PreprocessedRequest]) -> list[str]:
    echoes = [echo_of(model, request, place, one) for place, one in enumerate(prepared)]
    chars = sum(map(len, echoes)) * max(request.n or 1, 1)
    most = request_bounds().text_chars
    if chars > most:
        refuse_count(chars, most, "echo", "characters in all choices", TEXT_VARIABLE)
    return echoes


def echo_of(model: ServedModel, request: CompletionRequest, place: int, prepared: PreprocessedRequest) -> str:
    """Return the prompt as `echo` repeats it: the given text, or the tokens' text."""
    if not request.echo:
        return ""
    prompt = request.prompt
    if isinstance(prompt, str):
        return prompt
    given = prompt[place] if prompt is not None and place < len(prompt) else None
    return (
        given
        if isinstance(given, str)
        else model.preprocessor.tokenizer.decode(
            prepared.token_ids, skip_special_tokens=request.skip_special_tokens is not False
        )
    )


def best_choices(choices: Sequence[Choice], count: int, first_index: int) -> list[Choice]:
    """Return the most likely choices of one request, most likely first and renumbered."""
    ranked = sorted(choices, key=likelihood, reverse=True)[:count]
    for index, choice in enumerate(ranked, first_index):
        choice.renumber(index)
    return ranked


def likelihood(choice: Choice) -> float:
    """Return the log-probability of a choice's text: the worker's sum if reported, else the sum over tokens."""
    if choice.score is not None:
        return choice.score
    return sum(entry.logprob or 0.0 for entry in choice.entries or ())


def prompt_entries(generation: Generation) -> list[TokenEntry]:
    """Return the prompt's tokens with their logprobs. Raise `InvalidArgument` if the worker reports none."""
    ids, reported = generation.request.token_ids, _reported(generation, "echo", "echo together with logprobs")
    return [_prompt_entry(generation, token_id, one) for token_id, one in zip(ids, reported, strict=True)]


def prompt_logprobs(generation: Generation, count: int) -> list[dict[str, dict[str, Any]] | None]:
    """Return the prompt's logprobs, with `count` alternatives, in the form of vLLM's server.

    Raise `InvalidArgument` if the worker reports none.
    """
    rows = _reported(generation, "prompt_logprobs", "prompt_logprobs")
    return [
        None
        if row is None
        else {
            str(token): _decoded(generation, token, logprob, rank)
            for token, (logprob, rank) in row.items()
            if token == own or rank is None or rank <= count  # Echo may request more alternatives.
        }
        for own, row in zip(generation.request.token_ids, rows, strict=True)
    ]


def _reported(generation: Generation, param: str, feature: str) -> list[PromptRow]:
    """Return the reported row of each prompt token; after a migration the reported prompt is longer."""
    reported, length = generation.engine_data.get("prompt_logprobs"), len(generation.request.token_ids)
    if not isinstance(reported, list) or len(reported) < length:
        raise InvalidArgument(f"{feature}: the model's worker reports no log-probabilities of the prompt", param=param)
    return [prompt_row(one) for one in reported[:length]]


def _decoded(generation: Generation, token_id: int, logprob: float, rank: int | None) -> dict[str, Any]:
    return {"logprob": logprob, "rank": rank, "decoded_token": generation.token(token_id)[0]}


def _prompt_entry(generation: Generation, token_id: int, row: PromptRow) -> TokenEntry:
    text, raw = generation.token(token_id)
    if row is None:
        return TokenEntry(token_id, text, raw, None, [])
    wanted = generation.request.output_options.logprobs or 0
    likeliest = sorted(row, key=lambda one: -row[one][0])[:wanted]
    top = [(*generation.token(one), row[one][0]) for one in likeliest]
    return TokenEntry(token_id, text, raw, row[token_id][0] if token_id in row else 0.0, top)
