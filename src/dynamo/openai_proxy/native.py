"""Native: tokens by the native endpoints `/generate` of SGLang and `/completion` of llama.cpp. Pure."""

import re
from typing import Any

from dynamo.backend.request_fields import common_sampling, ends_of, json_text
from dynamo.core.codec import json_encode
from dynamo.core.errors import HttpError, InvalidArgument
from dynamo.openai_proxy.tokens import (
    ProxyLimits,
    ServerRequest,
    TokenResponseParser,
    biases_of,
    check_plain,
    max_output_tokens,
    present,
    wanted_rank,
)
from dynamo.protocols.engine import EngineOutput, GuidedDecoding, PreprocessedRequest


class SglangFormat:
    """`/generate` with `input_ids`."""

    is_api_path = False

    def server_request(self, request: PreprocessedRequest, limits: ProxyLimits) -> ServerRequest:
        check_plain(request)
        options, stop, logprobs = request.sampling_options, request.stop_conditions, request.output_options.logprobs
        max_tokens, biases, rank = max_output_tokens(request, limits), biases_of(request), wanted_rank(request, limits)
        sampling = {
            **common_sampling(options),
            "sampling_seed": options.seed,
            "max_new_tokens": max_tokens,
            "min_new_tokens": None if stop.min_tokens is None else min(stop.min_tokens, max_tokens),
            "ignore_eos": stop.ignore_eos or None,
            "stop_token_ids": ends_of(request) or None,
            "logit_bias": None if biases is None else {str(token): value for token, value in biases.items()},
            **_sglang_guided(options.guided_decoding),
        }
        given = {
            "return_logprob": True if logprobs is not None else None,
            "top_logprobs_num": logprobs or None,
            "lora_path": None if request.routing is None else request.routing.lora_name,
            "routed_dp_rank": rank,
            "data_parallel_rank": rank,  # The field's older name.
        }
        body = {
            "input_ids": request.token_ids,
            "sampling_params": present(sampling),
            "stream": True,
            **present(given),
        }
        return ServerRequest("/generate", body)

    def answer(self, request: PreprocessedRequest) -> "SglangResponseParser":
        return SglangResponseParser(request)


class SglangResponseParser(TokenResponseParser):
    """Parser of the chunks of `/generate`, which contain the whole output so far or only the new part."""

    def __init__(self, request: PreprocessedRequest) -> None:
        super().__init__(request)
        self._counts: dict[int, int] = {}

    def pieces(self, chunk: dict[str, Any]) -> list[EngineOutput]:
        meta, index = chunk["meta_info"], int(chunk.get("index") or 0)
        cached = meta.get("cached_tokens")
        self._cached_tokens = self._cached_tokens if cached is None else int(cached)
        previous, total = self._counts.get(index, 0), int(meta["completion_tokens"])
        fresh = max(0, total - previous)
        self._counts[index] = max(previous, total)
        token_ids = [int(one) for one in (chunk.get("output_ids") or ())[-fresh:]] if fresh else []
        ended = meta.get("finish_reason")
        if not token_ids and ended is None:
            return []
        piece = self._piece(token_ids, index)
        if self._logprobs is not None and token_ids and meta.get("output_token_logprobs"):
            owns = meta["output_token_logprobs"][-fresh:]
            tops = (meta.get("output_top_logprobs") or [None] * len(owns))[-fresh:]
            self._log(piece, [(_pair(own)[1], _tops(own, top)) for own, top in zip(owns, tops, strict=False)])
        if ended is None:
            return [piece]
        if ended["type"] == "abort" and 400 <= int(ended.get("status_code") or 0) < 500:
            raise HttpError(int(ended["status_code"]), str(ended.get("message") or "the server dropped the request"))
        return self._end(piece, ended["type"], ended.get("matched"))


def _pair(triple: Any) -> tuple[int, float]:
    """Return the token and log probability of SGLang's triple of log probability, token and text."""
    return int(triple[1]), float(triple[0] or 0.0)


def _tops(own: Any, triples: Any) -> list[tuple[int, float]]:
    """Return the alternatives of a token, including itself."""
    found = dict(_pair(one) for one in triples or ())
    found.setdefault(*_pair(own))
    return list(found.items())


def _sglang_guided(guided: GuidedDecoding | None) -> dict[str, Any]:
    if guided is None:
        return {}
    regex = guided.regex
    if guided.choice is not None:
        regex = f"({'|'.join(re.escape(one) for one in guided.choice)})"
    return {
        "json_schema": json_text(guided.json),
        "regex": regex,
        "ebnf": guided.grammar,
        "structural_tag": json_text(guided.structural_tag),
    }


class LlamaCppFormat:
    """`/completion` with the prompt as token ids."""

    is_api_path = False

    def server_request(self, request: PreprocessedRequest, limits: ProxyLimits) -> ServerRequest:
        check_plain(request)
        options, stop, logprobs = request.sampling_options, request.stop_conditions, request.output_options.logprobs
        for name, value in (
            ("n", None if (options.n or 1) == 1 else options.n),
            ("min_tokens", stop.min_tokens or None),
            ("max_thinking_tokens", stop.max_thinking_tokens),
            ("lora_name", None if request.routing is None else request.routing.lora_name),
        ):
            if value is not None:
                raise InvalidArgument(f"{name} {value}: not supported by llama.cpp's server", param=name)
        biases = biases_of(request)
        given = {
            "presence_penalty": options.presence_penalty,
            "frequency_penalty": options.frequency_penalty,
            "repeat_penalty": options.repetition_penalty,
            "temperature": options.temperature,
            "top_p": options.top_p,
            "top_k": None if options.top_k is None else max(0, options.top_k),
            "min_p": options.min_p,
            "seed": options.seed,
            "ignore_eos": stop.ignore_eos or None,
            "logit_bias": None if biases is None else [[token, value] for token, value in biases.items()],
            "n_probs": None if logprobs is None else max(1, logprobs),
            **_llama_guided(options.guided_decoding),
        }
        body = {
            "prompt": request.token_ids,
            "n_predict": max_output_tokens(request, limits),
            "return_tokens": True,
            "cache_prompt": True,
            "stream": True,
            **present(given),
        }
        return ServerRequest("/completion", body)

    def answer(self, request: PreprocessedRequest) -> "LlamaCppResponseParser":
        return LlamaCppResponseParser(request)


class LlamaCppResponseParser(TokenResponseParser):
    """Parser of the chunks of `/completion`. Other stop tokens than the server's own end of text are applied here."""

    def __init__(self, request: PreprocessedRequest) -> None:
        super().__init__(request)
        self._ends = set(ends_of(request))

    def pieces(self, chunk: dict[str, Any]) -> list[EngineOutput]:
        timings = chunk.get("timings") or {}
        if timings.get("cache_n") is not None:
            self._cached_tokens = int(timings["cache_n"])
        if self.is_finished:
            return []
        token_ids = [int(one) for one in chunk.get("tokens") or ()]
        place = next((at for at, token in enumerate(token_ids) if token in self._ends), None)
        if place is not None:
            del token_ids[place + 1 :]
        ended = "stop" if place is not None else _llama_end(chunk)
        if not token_ids and ended is None:
            return []
        piece = self._piece(token_ids, 0)
        rows = chunk.get("completion_probabilities")
        if self._logprobs is not None and rows and token_ids:
            self._log(piece, [_llama_row(one) for one in rows[: len(token_ids)]])
        if ended is None:
            return [piece]
        return self._end(piece, ended, token_ids[-1] if place is not None else None)


def _llama_end(chunk: dict[str, Any]) -> str | None:
    if not chunk.get("stop"):
        return None
    return "length" if chunk.get("stop_type") == "limit" or chunk.get("stopped_limit") else "stop"


def _llama_row(entry: dict[str, Any]) -> tuple[float, list[tuple[int, float]]]:
    own = int(entry["id"]), float(entry["logprob"])
    tops = dict((int(one["id"]), float(one["logprob"])) for one in entry.get("top_logprobs") or ())  # noqa: C402
    tops.setdefault(*own)
    return own[1], list(tops.items())


def _llama_guided(guided: GuidedDecoding | None) -> dict[str, Any]:
    if guided is None:
        return {}
    if guided.regex is not None or guided.structural_tag is not None:
        raise InvalidArgument(
            "llama.cpp's server supports a schema, a grammar or a choice only", param="guided_decoding"
        )
    grammar = guided.grammar
    if guided.choice is not None:
        grammar = "root ::= " + " | ".join(json_encode(one).decode() for one in guided.choice)
    return {"json_schema": guided.json, "grammar": grammar}
