"""Readers: the parsers of a request's answers, chosen from the runtime configuration in the model's card."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from msgspec import Struct

from dynamo.core.errors import ConfigError
from dynamo.parsers.base import ContentDelta, Event, Parser, ReasoningFamily, ToolCallFamily, tools_of
from dynamo.protocols.engine import PreprocessedRequest
from dynamo.protocols.model_card import RuntimeConfig
from dynamo.protocols.openai import ChatCompletionRequest
from dynamo.protocols.openai_ranges import chosen_tool, is_call_forced
from dynamo.text.answer_parsing import Reading, ThoughtsFirst

if TYPE_CHECKING:
    from dynamo.text.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

TAIL_TOKENS = 24  # End of a prompt where a template opens or closes the reasoning; longer than any marker.

F = TypeVar("F")


class AnswerReader(Struct, frozen=True):
    """Parsing of the answers to one request."""

    make: Callable[[], Parser] | None = None
    """Factory of the parser of one choice; None: all text is content."""
    shown: frozenset[int] = frozenset()
    """Special tokens that the parser needs in its input."""
    finds_thoughts: bool = False
    """Whether reasoning is separated from the rest."""
    calls_max: int | None = None
    """Maximum number of calls reported per choice."""

    def reading(self) -> Reading:
        """Return a new reading for one choice."""
        return Reading(None if self.make is None else self.make(), self.calls_max)


PLAIN = AnswerReader()


class ForcedCalls:
    """Tool calls of an answer constrained to JSON; the model's own call format is accepted as well."""

    def __init__(self, tool: str | None, own_way: Callable[[], Parser] | None) -> None:
        self._tool = tool
        self._own_way = own_way
        self._space = ""
        self._chosen: Parser | None = None

    def feed(self, text: str) -> list[Event]:
        """Process more text; see `Parser.feed`."""
        if self._chosen is None:
            text = self._space = self._space + text
            begin = text.lstrip()
            if not begin:
                return []
            if self._own_way is None or begin[0] in "[{":
                from dynamo.parsers.guided_calls import GuidedCalls

                self._chosen = GuidedCalls(self._tool)
            else:
                self._chosen = self._own_way()
        return self._chosen.feed(text)

    def finish(self) -> list[Event]:
        """Process the end of the text; see `Parser.finish`."""
        if self._chosen is not None:
            return self._chosen.finish()
        return [ContentDelta(self._space)] if self._space else []


class Readers:
    """Answer parsers of one model."""

    def __init__(self, config: RuntimeConfig, tokenizer: "Tokenizer") -> None:
        """Find the model's parsers; log a warning for an unknown one, in which case text is passed on unparsed."""
        self._tokenizer = tokenizer
        self._calls: ToolCallFamily | None = None
        self._thoughts: ReasoningFamily | None = None
        if config.tool_call_parser or config.reasoning_parser:
            from dynamo.parsers.registry import reasoning_family, tool_call_family  # Loads every parser.

            self._calls = _known(tool_call_family, config.tool_call_parser)
            self._thoughts = _known(reasoning_family, config.reasoning_parser)
        self._shown: dict[tuple[str, ...], frozenset[int]] = {}

    @property
    def finds_thoughts(self) -> bool:
        """Whether the model's reasoning is separated from the rest of its text."""
        return self._thoughts is not None

    def of_chat(self, request: ChatCompletionRequest, prepared: PreprocessedRequest) -> AnswerReader | None:
        """Return the reader of this request's answers; None if they are plain text."""
        make_calls, call_markers = self._calls_of(request, prepared)
        thoughts = self._thoughts
        if make_calls is None and thoughts is None:
            return None
        from dynamo.parsers import harmony
        from dynamo.parsers.registry import before_calls

        is_thinking = thoughts is not None and self._begins_inside(thoughts, request, prepared.token_ids)
        in_channels = make_calls is not None and make_calls.func is harmony.harmony

        def make() -> Parser:
            if in_channels and thoughts in (None, harmony.THOUGHTS):
                return harmony.harmony(tools_of(request.tools), is_thinking)  # One parser handles all channels.
            second = None if make_calls is None else make_calls()
            if thoughts is None:
                assert second is not None, "a reader needs a reasoning parser or a call parser"
                return second
            if second is None:
                return ThoughtsFirst(thoughts.make(is_thinking), second)
            return ThoughtsFirst(before_calls(thoughts, is_thinking, call_markers), second)

        markers = (*call_markers, *(thoughts.markers if thoughts else ()))
        calls_max = 1 if request.parallel_tool_calls is False else None
        return AnswerReader(make, self._specials_in(markers), thoughts is not None, calls_max)

    def _calls_of(
        self, request: ChatCompletionRequest, prepared: PreprocessedRequest
    ) -> tuple["partial[Parser] | partial[ForcedCalls] | None", tuple[str, ...]]:
        """Return the factory of the tool call parser and the markers that it looks for.

        A call constrained to JSON is parsed as JSON; other constrained JSON is content.
        """
        if not request.tools or request.tool_choice == "none":
            return None, ()
        own_way: partial[Parser] | None = None
        markers: tuple[str, ...] = ()
        if self._calls is not None:
            own_way, markers = partial(self._calls.make, tools_of(request.tools)), self._calls.markers
        guided = prepared.sampling_options.guided_decoding
        if guided is not None and guided.structural_tag is None:
            if not is_call_forced(request):
                return None, ()
            return partial(ForcedCalls, chosen_tool(request.tool_choice), own_way), markers
        return own_way, markers

    def is_past_thoughts(self, prepared: PreprocessedRequest) -> bool:
        """Return whether the prompt itself closes the reasoning, as templates do when reasoning is disabled."""
        return self._thoughts is not None and self._end_of(self._thoughts, prepared.token_ids) is False

    def _begins_inside(self, thoughts: ReasoningFamily, request: ChatCompletionRequest, prompt: Sequence[int]) -> bool:
        """Return whether an answer begins inside the reasoning: as the prompt ends, else as is usual."""
        from dynamo.parsers.reasoning import opened_by_prompt

        content = request.messages[-1].content if request.continue_final_message else None
        if isinstance(content, str):
            begun = opened_by_prompt(thoughts, content, is_continued=True)
            if begun is not None:
                return begun
        end = self._end_of(thoughts, prompt)
        return thoughts.starts_inside if end is None else end

    def _end_of(self, thoughts: ReasoningFamily, prompt: Sequence[int]) -> bool | None:
        """Return True if the prompt ends inside the reasoning, False if it has just closed it, None if undetermined."""
        from dynamo.parsers.reasoning import opened_by_prompt

        end = self._tokenizer.decode(prompt[-TAIL_TOKENS:], skip_special_tokens=False)
        return opened_by_prompt(thoughts, end)

    def _specials_in(self, markers: tuple[str, ...]) -> frozenset[int]:
        """Return the special tokens that are a marker or part of one."""
        shown = self._shown.get(markers)
        if shown is None:
            spelled = self._tokenizer.token_bytes()
            shown = self._shown[markers] = frozenset(
                token_id
                for token_id in self._tokenizer.special_ids
                if any(spelled[token_id].decode("utf-8", "replace") in marker for marker in markers)
            )
        return shown


def _known(find: Callable[[str], F], name: str | None) -> F | None:
    if not name:
        return None
    try:
        return find(name)
    except ConfigError as error:
        logger.warning("unknown parser: %s; the model's text is passed on unparsed", error)
        return None
