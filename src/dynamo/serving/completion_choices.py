"""Completion choices: selection of the choices to show, and their prompt log-probabilities and echo."""

from collections.abc import Callable, Sequence

from dynamo.protocols.engine import PreprocessedRequest
from dynamo.protocols.openai import CommonRequest, CompletionRequest
from dynamo.serving.answers import all_choices
from dynamo.serving.choice import Choice, best_choices
from dynamo.serving.generation import Generation
from dynamo.serving.served_model import ServedModel


def add_prompt_logprobs(request: CommonRequest, generations: Sequence[Generation]) -> None:
    """Add prompt log-probabilities to the choices if requested. Raise `InvalidArgument` if a worker reports none."""
    if request.prompt_logprobs is None:
        return
    for generation in generations:
        found = generation.prompt_logprobs(request.prompt_logprobs)
        for choice in generation.choices:
            choice.prompt_logprobs = found


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
                choice.entries = None
        if request.echo and request.logprobs is not None:
            for generation in generations:
                before = generation.prompt_entries()
                for choice in generation.choices:
                    choice.entries = [*before, *(choice.entries or ())]
        return shown

    return finish


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
