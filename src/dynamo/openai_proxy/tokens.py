"""Tokens: the common part of all APIs for requests in tokens. Pure."""

import abc
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from dynamo.backend.request_fields import check_prompt, hidden_ends_of, own_options, rank_of, token_biases
from dynamo.core.errors import DynamoException, EngineShutdown, InvalidArgument, StreamIncomplete, Unknown
from dynamo.openai_proxy.convert import refusal_in
from dynamo.protocols.engine import CompletionUsage, EngineOutput, PreprocessedRequest, PromptTokensDetails, TopLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyLimits:
    """Limits of the server."""

    model: str
    """The server's name of the model."""
    context_length: int
    ranks: int = 1


@dataclass(frozen=True, slots=True)
class ServerRequest:
    """A request in the server's format."""

    path: str
    body: Mapping[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)


class TokenFormat(Protocol):
    """Request and response format of one API for tokens."""

    is_api_path: bool
    """Whether its path is below the API's path; otherwise it is below the server's URL."""

    def server_request(self, request: PreprocessedRequest, limits: ProxyLimits) -> ServerRequest:
        """Return the server's request. Raises `InvalidArgument` for an unsupported one."""

    def answer(self, request: PreprocessedRequest) -> "TokenResponseParser":
        """Return the parser of the response."""


class TokenResponseParser(abc.ABC):
    """State of one response. The last piece is held back until the token counts have arrived."""

    def __init__(self, request: PreprocessedRequest) -> None:
        self._prompt_tokens = len(request.token_ids)
        self._hidden = hidden_ends_of(request)
        self._logprobs = request.output_options.logprobs
        self._unfinished = request.sampling_options.n or 1
        self._cached_tokens: int | None = None
        self._counted = 0
        """Output tokens by the server's count, which includes hidden ones."""
        self._held: EngineOutput | None = None
        self._cum_log_probs: dict[int, float] = {}
        self.output_tokens = 0
        """Number of tokens of all choices."""

    @property
    def is_finished(self) -> bool:
        """Return whether every choice has finished."""
        return self._unfinished <= 0

    def take(self, chunk: Any) -> list[EngineOutput]:
        """Return the new output in a chunk. Raises the chunk's error."""
        if not isinstance(chunk, dict):
            raise Unknown(f"malformed chunk from the server: {str(chunk)[:80]}: expected an object")
        if chunk.get("error"):
            raise refusal_in(chunk["error"])
        try:
            return self.pieces(chunk)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise Unknown(f"malformed chunk from the server: {type(error).__name__}: {error}") from None

    @abc.abstractmethod
    def pieces(self, chunk: dict[str, Any]) -> list[EngineOutput]:
        """Return the new output in a chunk of this format, which may be malformed in any way."""

    def end(self) -> EngineOutput:
        """Return the last piece, at the end of the stream. Raises `StreamIncomplete` if the stream ended early."""
        if self._held is None or not self.is_finished:
            raise StreamIncomplete("the server closed the stream before the end of the response")
        self._held.completion_usage = self.usage()
        return self._held

    def usage(self) -> CompletionUsage:
        """Return the token counts so far."""
        details = None if self._cached_tokens is None else PromptTokensDetails(cached_tokens=self._cached_tokens)
        output_tokens = max(self.output_tokens, self._counted)
        return CompletionUsage(self._prompt_tokens, output_tokens, self._prompt_tokens + output_tokens, details)

    def _piece(self, token_ids: list[int], index: int) -> EngineOutput:
        self.output_tokens += len(token_ids)
        return EngineOutput(token_ids, index)

    def _log(self, piece: EngineOutput, rows: list[tuple[float, list[tuple[int, float]]]]) -> None:
        """Add a row for each token: its log probability, and those of its alternatives."""
        assert self._logprobs is not None, "only called if log probabilities were requested"
        wanted = max(1, self._logprobs)
        piece.log_probs = [own for own, _ in rows]
        piece.top_logprobs = [ranked(tops)[:wanted] for _, tops in rows]
        index = piece.index or 0
        self._cum_log_probs[index] = self._cum_log_probs.get(index, 0.0) + sum(piece.log_probs)
        piece.cum_log_probs = self._cum_log_probs[index]

    def _end(self, piece: EngineOutput, reason: str, stopped_by: int | str | None) -> list[EngineOutput]:
        """Mark the piece as the last one of its choice; that of the last choice is held back.

        Raises an error for a response that the server aborted.
        """
        if reason in ("abort", "error"):
            raise given_up(reason)
        self._unfinished -= 1
        last = piece.token_ids[-1] if piece.token_ids else None
        piece.finish_reason = reason if reason in ("length", "content_filter") else "stop"
        if last in self._hidden and reason == "stop":
            piece.finish_reason = "eos"
        elif reason == "stop" and stopped_by not in self._hidden:
            piece.stop_reason = stopped_by
        if self._unfinished > 0:
            return [piece]
        self._held = piece
        return []


def given_up(reason: str) -> DynamoException:
    """Return the error for an aborted response."""
    return EngineShutdown("the server aborted the request") if reason == "abort" else Unknown("the server failed")


def ranked(tops: list[tuple[int, float]]) -> list[TopLogprob]:
    """Return the alternatives, most likely first."""
    tops = sorted(tops, key=lambda one: -one[1])
    return [TopLogprob(rank, token, logprob=logprob) for rank, (token, logprob) in enumerate(tops, 1)]


def max_output_tokens(request: PreprocessedRequest, limits: ProxyLimits) -> int:
    """Return the maximum number of output tokens. Raises `InvalidArgument` for a prompt that leaves none."""
    check_prompt(request, limits.context_length)
    max_tokens = limits.context_length - len(request.token_ids)
    wanted = request.stop_conditions.max_tokens
    return max_tokens if wanted is None else min(wanted, max_tokens)


def wanted_rank(request: PreprocessedRequest, limits: ProxyLimits) -> int | None:
    """Return the requested rank; None if there is only one. Raises `InvalidArgument` for an unknown rank."""
    return rank_of(request.routing.dp_rank if request.routing is not None else None, limits.ranks, 0)


def biases_of(request: PreprocessedRequest) -> dict[int, float] | None:
    """Return the biases by token, if there are any. Raises `InvalidArgument`."""
    given = own_options(request).get("logit_bias")
    return None if given is None else token_biases(given)


def check_plain(request: PreprocessedRequest) -> None:
    """Raise `InvalidArgument` for features that no server supports with tokens."""
    if request.multi_modal_data:
        kinds = ", ".join(request.multi_modal_data)
        raise InvalidArgument(
            f"{kinds} parts: not supported in tokens; use a worker with --input text", param="messages"
        )
    if request.sampling_options.use_beam_search:
        raise InvalidArgument("use_beam_search is not supported by this worker", param="use_beam_search")
    if request.output_options.prompt_logprobs is not None:
        raise InvalidArgument(
            "prompt_logprobs (required by echo with logprobs) is not supported by this worker: streaming servers do not "
            "report them",
            param="prompt_logprobs",
        )


def present(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that are not None."""
    return {name: value for name, value in given.items() if value is not None}
