"""Completions: tokens by `/v1/completions`, from `return_token_ids` or from the names in logprobs. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from dynamo.backend.request_fields import common_sampling, ends_of, json_text, own_options, thinking_budget
from dynamo.core.errors import Unknown
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

TOKEN = "token_id:"  # noqa: S105 - prefix of a token's name
RANK_HEADER = "X-data-parallel-rank"
EXTRAS = ("allowed_token_ids", "bad_words")
STRUCTURED_SINCE = (0, 11)
"""First vLLM version with `structured_outputs`; older ones, and other servers, have one field for each kind."""


class CompletionsFormat:
    """`/v1/completions` with the prompt as token ids."""

    is_api_path = True

    def __init__(self, *, returns_ids: bool, version: Sequence[int] = ()) -> None:
        """`returns_ids`: the server supports `return_token_ids`; `version` is vLLM's, empty for other servers."""
        self._tells_ids = returns_ids
        self._is_structured = tuple(version) >= STRUCTURED_SINCE

    def server_request(self, request: PreprocessedRequest, limits: ProxyLimits) -> ServerRequest:
        check_plain(request)
        options, stop, output, routing = (
            request.sampling_options, request.stop_conditions, request.output_options, request.routing,
        )  # fmt: skip
        max_tokens = max_output_tokens(request, limits)
        logprobs = output.logprobs if self._tells_ids or output.logprobs is not None else 0
        own, biases = own_options(request), biases_of(request)
        given = {
            **common_sampling(options),
            "best_of": options.best_of if (options.best_of or 1) > (options.n or 1) else None,
            "seed": options.seed,
            "min_tokens": None if stop.min_tokens is None else min(stop.min_tokens, max_tokens),
            "ignore_eos": stop.ignore_eos or None,
            "stop_token_ids": ends_of(request) or None,
            "thinking_token_budget": thinking_budget(request),
            "logprobs": logprobs,
            "return_tokens_as_token_ids": True if logprobs is not None else None,
            "return_token_ids": True if self._tells_ids else None,
            "logit_bias": None if biases is None else {str(token): value for token, value in biases.items()},
            "cache_salt": None if routing is None else routing.cache_salt or None,
            **{name: own.get(name) for name in EXTRAS},
            **self._guided(options.guided_decoding),
        }
        body = {
            "model": (None if routing is None else routing.lora_name) or limits.model,
            "prompt": request.token_ids,
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **present(given),
        }
        rank = wanted_rank(request, limits)
        return ServerRequest("/completions", body, {} if rank is None else {RANK_HEADER: str(rank)})

    def answer(self, request: PreprocessedRequest) -> "CompletionsResponseParser":
        return CompletionsResponseParser(request, returns_ids=self._tells_ids)

    def _guided(self, guided: GuidedDecoding | None) -> dict[str, Any]:
        if guided is None:
            return {}
        given = present(
            {
                "json": guided.json,
                "regex": guided.regex,
                "choice": guided.choice,
                "grammar": guided.grammar,
                "structural_tag": json_text(guided.structural_tag),
                "whitespace_pattern": guided.whitespace_pattern,
            }
        )
        if self._is_structured:
            return {"structured_outputs": given} if given else {}
        return {f"guided_{name}": value for name, value in given.items()}


class CompletionsResponseParser(TokenResponseParser):
    """Parser of the chunks of `/v1/completions`."""

    def __init__(self, request: PreprocessedRequest, *, returns_ids: bool) -> None:
        super().__init__(request)
        self._tells_ids = returns_ids
        self.kv_transfer_params: dict[str, Any] | None = None
        """A prefill server's description of the transferable blocks."""

    def pieces(self, chunk: dict[str, Any]) -> list[EngineOutput]:
        usage = chunk.get("usage")
        if usage:
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
            self._cached_tokens = self._cached_tokens if cached is None else int(cached)
            self._counted = int(usage.get("completion_tokens") or 0)
        if isinstance(chunk.get("kv_transfer_params"), dict):
            self.kv_transfer_params = chunk["kv_transfer_params"]
        return [piece for choice in chunk.get("choices") or () for piece in self._choice(choice)]

    def _choice(self, choice: Mapping[str, Any]) -> list[EngineOutput]:
        logged = choice.get("logprobs")
        if self._tells_ids:
            token_ids = [int(one) for one in choice.get("token_ids") or ()]
            if choice.get("token_ids") is None and choice.get("text"):
                raise Unknown(
                    "the response has no token_ids: return_token_ids is not supported; use --token-api logprobs"
                )
        else:
            token_ids = [] if logged is None else [_token_id(one) for one in logged.get("tokens") or ()]
            if logged is None and choice.get("text") and not self.output_tokens:
                raise Unknown("the response has no logprobs, so its tokens are unknown; use --input text")
        reason = choice.get("finish_reason")
        if not token_ids and reason is None:
            return []
        piece = self._piece(token_ids, int(choice.get("index") or 0))
        if self._logprobs is not None and logged and token_ids:
            self._log(piece, _rows(logged))
        if reason is None:
            return [piece]
        return self._end(piece, reason, choice.get("stop_reason"))


def _rows(logged: Mapping[str, Any]) -> list[tuple[float, list[tuple[int, float]]]]:
    owns = [float(one or 0.0) for one in logged["token_logprobs"]]
    tops = logged.get("top_logprobs") or [None] * len(owns)
    rows = []
    for name, own, row in zip(logged["tokens"], owns, tops, strict=False):
        row = row or {name: own}  # noqa: PLW2901 - without requested alternatives the row is empty
        rows.append((own, [(_token_id(token), float(value)) for token, value in row.items()]))
    return rows


def _token_id(name: str) -> int:
    """Return the id in a token's name. Raises `ValueError` for a token that is named by its text."""
    if not name.startswith(TOKEN):
        raise ValueError(f"token {name[:40]!r}: expected {TOKEN} and a number (return_tokens_as_token_ids)")
    return int(name[len(TOKEN) :])
