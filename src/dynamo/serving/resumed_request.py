"""The request that continues a stream on another worker, and the parameters that prevent this. Pure.

The next worker receives the prompt and all tokens received so far as its prompt, and accordingly reduced token limits.
"""

import msgspec

from dynamo.protocols.engine import RESUMED, PreprocessedRequest, Resumed


def obstacle_of(request: PreprocessedRequest, *, resumes_sampling: bool) -> str | None:
    """Return the parameter whose state does not follow from a request's tokens; None if there is none.

    Engines count penalties over output tokens only, and draw one random number per output token: if the output so far
    becomes part of the prompt, both restart, unless the engine `resumes_sampling`.
    """
    sampling, output = request.sampling_options, request.output_options
    own = {} if request.extra_args is msgspec.UNSET else request.extra_args.get("sampling_options") or {}
    is_sampled = sampling.temperature is None or sampling.temperature > 0
    lost = {
        "n": (sampling.n or 1) > 1,
        "best_of": (sampling.best_of or 1) > 1,
        "use_beam_search": bool(sampling.use_beam_search),
        "guided_decoding": sampling.guided_decoding is not None,
        "logprobs": output.logprobs is not None,
        "prompt_embeds": bool(request.prompt_embeds),
        "prompt_logprobs": output.prompt_logprobs is not None,
        "bad_words": bool(own.get("bad_words")),
        "presence_penalty": bool(sampling.presence_penalty) and not resumes_sampling,
        "frequency_penalty": bool(sampling.frequency_penalty) and not resumes_sampling,
        "seed": sampling.seed is not None and is_sampled and not resumes_sampling,
    }
    return next((name for name, is_lost in lost.items() if is_lost), None)


def resumed(
    request: PreprocessedRequest, received_ids: list[int], thinking_tokens: int = 0
) -> PreprocessedRequest | None:
    """Return the request that continues after the received tokens, of which `thinking_tokens` were reasoning.

    None if the token limit is reached and only the end was missing.
    """
    stop = request.stop_conditions
    left = None if stop.max_tokens is None else stop.max_tokens - len(received_ids)
    if left is not None and left <= 0:
        return None
    least = None if stop.min_tokens is None else max(0, stop.min_tokens - len(received_ids))
    thoughts = stop.max_thinking_tokens
    spent = 0 if thoughts is None else min(thinking_tokens, thoughts)
    again = msgspec.structs.replace(
        request,
        token_ids=request.token_ids + received_ids,
        stop_conditions=msgspec.structs.replace(
            stop,
            max_tokens=left,
            min_tokens=least,
            max_thinking_tokens=None if thoughts is None else thoughts - spent,
        ),
    )
    sampling = request.sampling_options
    if thoughts is not None or sampling.presence_penalty or sampling.frequency_penalty:
        extra = {} if request.extra_args is msgspec.UNSET else request.extra_args
        again.extra_args = {**extra, RESUMED: msgspec.to_builtins(Resumed(len(received_ids), spent))}
    return again
