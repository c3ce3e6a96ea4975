"""Tokens: what all ways of asking a server for tokens share. Pure."""

import abc
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from dynamo.backend.asked import check_prompt, hidden_ends_of, own_options, rank_of, token_biases
from dynamo.core.errors import DynamoException, EngineShutdown, InvalidArgument, StreamIncomplete, Unknown
from dynamo.openai_proxy.convert import refusal_in
from dynamo.protocols.engine import CompletionUsage, EngineOutput, PreprocessedRequest, PromptTokensDetails, TopLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the server can take."""

    model: str
    """Its own name of the model."""
    context_length: int
    ranks: int = 1


@dataclass(frozen=True, slots=True)
class Asked:
    """A request in the server's words."""

    path: str
    body: Mapping[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)


class Form(Protocol):
    """One way of asking a server for tokens."""

    is_api_path: bool
    """Whether its path is below the API's beginning; otherwise it is below the server's."""

    def asked(self, request: PreprocessedRequest, limits: Limits) -> Asked:
        """Raises `InvalidArgument` for what this server cannot be asked."""

    def answer(self, request: PreprocessedRequest) -> "TokenAnswer":
        """Who reads the answer."""


class TokenAnswer(abc.ABC):
    """What was said so far of one request. The last piece of all is held back until the counts have come."""

    def __init__(self, request: PreprocessedRequest) -> None:
        self._prompt_tokens = len(request.token_ids)
        self._hidden = hidden_ends_of(request)
        self._logprobs = request.output_options.logprobs
        self._unfinished = request.sampling_options.n or 1
        self._cached_tokens: int | None = None
        self._counted = 0
        """Tokens of the answer by the server's count, which knows those that it shows nobody."""
        self._held: EngineOutput | None = None
        self._cum_log_probs: dict[int, float] = {}
        self.said = 0
        """Tokens of all choices."""

    @property
    def is_finished(self) -> bool:
        """Whether every choice has its end."""
        return self._unfinished <= 0

    def take(self, chunk: Any) -> list[EngineOutput]:
        """What is new in a chunk. Raises the error that it is."""
        if not isinstance(chunk, dict):
            raise Unknown(f"the server's chunk is {str(chunk)[:80]}: expected an object")
        if chunk.get("error"):
            raise refusal_in(chunk["error"])
        try:
            return self.pieces(chunk)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise Unknown(f"the server's chunk cannot be read: {type(error).__name__}: {error}") from None

    @abc.abstractmethod
    def pieces(self, chunk: dict[str, Any]) -> list[EngineOutput]:
        """The same, of one form's chunk; it may be broken in any way."""

    def end(self) -> EngineOutput:
        """The last piece: the stream is over. Raises `StreamIncomplete` for one without its end."""
        if self._held is None or not self.is_finished:
            raise StreamIncomplete("the server ended its stream before the answer's end")
        self._held.completion_usage = self.usage()
        return self._held

    def usage(self) -> CompletionUsage:
        """The counts so far."""
        details = None if self._cached_tokens is None else PromptTokensDetails(cached_tokens=self._cached_tokens)
        said = max(self.said, self._counted)
        return CompletionUsage(self._prompt_tokens, said, self._prompt_tokens + said, details)

    def _piece(self, token_ids: list[int], index: int) -> EngineOutput:
        self.said += len(token_ids)
        return EngineOutput(token_ids, index)

    def _log(self, piece: EngineOutput, rows: list[tuple[float, list[tuple[int, float]]]]) -> None:
        """A row for each token: its likelihood, and those of its alternatives."""
        assert self._logprobs is not None, "they were asked for"
        wanted = max(1, self._logprobs)
        piece.log_probs = [own for own, _ in rows]
        piece.top_logprobs = [ranked(tops)[:wanted] for _, tops in rows]
        index = piece.index or 0
        self._cum_log_probs[index] = self._cum_log_probs.get(index, 0.0) + sum(piece.log_probs)
        piece.cum_log_probs = self._cum_log_probs[index]

    def _end(self, piece: EngineOutput, reason: str, stopped_by: int | str | None) -> list[EngineOutput]:
        """Makes it the last piece of its choice; of the last choice it is held back.

        Raises for an answer that the server gave up.
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
    """Why an answer was not finished."""
    return EngineShutdown("the server dropped the request") if reason == "abort" else Unknown("the server failed")


def ranked(tops: list[tuple[int, float]]) -> list[TopLogprob]:
    """Alternatives from the likeliest on."""
    tops = sorted(tops, key=lambda one: -one[1])
    return [TopLogprob(rank, token, logprob=logprob) for rank, (token, logprob) in enumerate(tops, 1)]


def room_of(request: PreprocessedRequest, limits: Limits) -> int:
    """How many tokens the answer may have. Raises `InvalidArgument` for a prompt that leaves none."""
    check_prompt(request, limits.context_length)
    room = limits.context_length - len(request.token_ids)
    wanted = request.stop_conditions.max_tokens
    return room if wanted is None else min(wanted, room)


def wanted_rank(request: PreprocessedRequest, limits: Limits) -> int | None:
    """Which rank is asked for; None where there is nothing to choose. Raises `InvalidArgument` for none of them."""
    return rank_of(request.routing.dp_rank if request.routing is not None else None, limits.ranks, 0)


def biases_of(request: PreprocessedRequest) -> dict[int, float] | None:
    """Biases by token, where there are any. Raises `InvalidArgument`."""
    given = own_options(request).get("logit_bias")
    return None if given is None else token_biases(given)


def check_plain(request: PreprocessedRequest) -> None:
    """Raises `InvalidArgument` for what no server is asked in tokens."""
    if request.multi_modal_data:
        kinds = ", ".join(request.multi_modal_data)
        raise InvalidArgument(f"{kinds} parts: this worker sends tokens; --input text takes them", param="messages")
    if request.sampling_options.use_beam_search:
        raise InvalidArgument("use_beam_search is not supported by this worker", param="use_beam_search")
    if request.output_options.prompt_logprobs is not None:
        raise InvalidArgument(
            "prompt_logprobs (which echo with logprobs needs) is not supported by this worker: streaming servers do not "
            "report them",
            param="prompt_logprobs",
        )


def present(given: Mapping[str, Any]) -> dict[str, Any]:
    """Without what nobody said."""
    return {name: value for name, value in given.items() if value is not None}
