"""Reasoning: one module for each group of formats; `FAMILIES` lists all of them."""

from collections.abc import Callable
from functools import partial

from dynamo.parsers import harmony
from dynamo.parsers.base import Parser, ReasoningFamily
from dynamo.parsers.reasoning import inkling, kimi_k3, muse
from dynamo.parsers.reasoning.inkling import InklingParser
from dynamo.parsers.reasoning.kimi_k3 import KimiK3Parser
from dynamo.parsers.reasoning.muse import MuseParser
from dynamo.parsers.reasoning.thoughts import BracketParser, Brackets, InlineParser, blocks_of

THINK = Brackets()
KIMI_K2 = Brackets(leaves=("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>"))
DEEPSEEK_V3_2 = Brackets(leaves=("<｜DSML｜function_calls>",))
DEEPSEEK_V4 = Brackets(leaves=("<｜DSML｜tool_calls>", "<｜DSML｜invoke name="))
DEEPSEEK_V41 = Brackets(leaves=("<｜DSML｜ calls>", "<｜DSML｜ invoke name="))
MINIMAX_M2 = Brackets(leaves=("<minimax:tool_call>", "<invoke name="))
MINIMAX_M3 = Brackets(("<mm:think>",), ("</mm:think>",), leaves=("]<]minimax[>[",))
KIMI = Brackets(("◁think▷",), ("◁/think▷",))
MISTRAL = Brackets(("[THINK]",), ("[/THINK]",))
GRANITE = Brackets(
    ("Here's my thought process:", "Here is my thought process:"),
    ("Here's my response:", "Here is my response:"),
)
GEMMA4 = Brackets(("<|channel>",), ("<channel|>",), label="thought\n")


def bracketed(name: str, brackets: Brackets, *aliases: str, starts_inside: bool = False) -> ReasoningFamily:
    """Return a family whose reasoning is enclosed in two markers."""
    opening = "" if starts_inside else brackets.opens[0] + brackets.label
    return ReasoningFamily(
        name=name,
        make=partial(BracketParser, brackets),
        make_before_calls=lambda is_inside, markers: BracketParser(brackets, is_inside, blocks_of(markers, brackets)),
        markers=brackets.markers,
        starts_inside=starts_inside,
        example=f"{opening}two and two{brackets.closes[0]}Four.",
        aliases=aliases,
        opened_by=tuple(one + label for one in brackets.opens for label in sorted({"", brackets.label})),
        closed_by=brackets.closes,
    )


def in_messages(
    name: str,
    make: Callable[[bool, bool], Parser],
    markers: tuple[str, ...],
    example: str,
    *aliases: str,
    opened_by: tuple[str, ...],
    closed_by: tuple[str, ...],
) -> ReasoningFamily:
    """Return a family whose reasoning, content and calls are messages of one kind of frame."""
    return ReasoningFamily(
        name=name,
        make=lambda is_inside: make(is_inside, False),
        markers=markers,
        starts_inside=False,
        example=example,
        aliases=aliases,
        make_before_calls=lambda is_inside, _: make(is_inside, True),
        opened_by=opened_by,
        closed_by=closed_by,
    )


FAMILIES: tuple[ReasoningFamily, ...] = (
    bracketed("basic", THINK),
    bracketed("qwen3", THINK, "qwen3_coder"),
    bracketed("glm45", THINK, "glm47", "nemotron_deci"),
    bracketed("deepseek_r1", THINK, starts_inside=True),
    bracketed("deepseek_v3", THINK, "deepseek_v3_1"),
    bracketed("deepseek_v3_2", DEEPSEEK_V3_2, starts_inside=True),
    bracketed("deepseek_v4", DEEPSEEK_V4, "deepseek-v4", "deepseekv4"),
    bracketed("deepseek_v41", DEEPSEEK_V41),
    bracketed("nemotron3", THINK, "nemotron_v3", "nemotron_nano", starts_inside=True),
    bracketed("step3", THINK, starts_inside=True),
    bracketed("kimi", KIMI),
    bracketed("kimi_k2", KIMI_K2),
    bracketed("kimi_k25", KIMI_K2, starts_inside=True),
    bracketed("minimax_m2", MINIMAX_M2, starts_inside=True),
    bracketed("minimax_m3", MINIMAX_M3, "minimax-m3"),
    bracketed("mistral", MISTRAL),
    bracketed("granite", GRANITE),
    bracketed("gemma4", GEMMA4, "gemma-4"),
    ReasoningFamily(
        name="minimax_append_think",
        make=lambda _: InlineParser("<think>"),
        markers=(),
        starts_inside=False,
        example="two and two</think>Four.",
    ),
    harmony.THOUGHTS,
    in_messages(
        "muse",
        MuseParser,
        muse.MARKERS,
        " to=self<|message|>two and two<|eom|><|start|>assistant to=user<|message|>Four.<|eot|>",
        "muse_glimmer",
        opened_by=("to=self<|message|>",),
        closed_by=("to=user<|message|>",),
    ),
    in_messages(
        "inkling",
        InklingParser,
        inkling.MARKERS,
        "<|content_thinking|>two and two<|end_message|><|message_model|><|content_text|>Four.<|end_message|>",
        opened_by=(inkling.THINKING,),
        closed_by=(inkling.TEXT,),
    ),
    in_messages(
        "kimi_k3",
        KimiK3Parser,
        kimi_k3.MARKERS,
        "<|open|>think<|sep|>two and two<|close|>think<|sep|><|open|>response<|sep|>Four.<|close|>response<|sep|>",
        "kimi-k3",
        opened_by=("<|open|>think<|sep|>",),
        closed_by=("<|close|>think<|sep|>", "<|open|>response<|sep|>"),
    ),
)


def opened_by_prompt(family: ReasoningFamily | str, prompt: str, *, is_continued: bool = False) -> bool | None:
    """Return whether the end of a prompt, of which the last few hundred characters suffice, opens the reasoning.

    True: it ends with the opening marker, and the text begins inside. False: it ends with the closing marker. None:
    neither, and the text begins as is usual for the family. `is_continued`: the prompt ends within the answer that is
    continued, and `prompt` is that answer.
    """
    if isinstance(family, str):
        known = next((one for one in FAMILIES if family in (one.name, *one.aliases)), None)
        if known is None:
            return None
        family = known
    if is_continued:
        opened = max((prompt.rfind(one) for one in family.opened_by), default=-1)
        closed = max((prompt.rfind(one) for one in family.closed_by), default=-1)
        return None if opened == closed else opened > closed
    ending = prompt.rstrip()
    if ending.endswith(tuple(one.rstrip() for one in family.opened_by)):
        return True
    return False if ending.endswith(family.closed_by) else None
