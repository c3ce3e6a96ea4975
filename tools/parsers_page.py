"""Parsers page: write every family of parsers into docs/parsers.md, between its two markers."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from dynamo.parsers.base import ReasoningFamily, ToolCallFamily
from dynamo.parsers.registry import REASONING, TOOL_CALLS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "parsers.md"
BEGIN, END = "<!-- families: written by tools/parsers_page.py -->", "<!-- end of families -->"

F = TypeVar("F", ToolCallFamily, ReasoningFamily)

FORMATS = {
    "hermes": "one JSON object, a list of them or several in a row, between `<tool_call>` and `</tool_call>`",
    "default": "as `nemotron_deci` and `llama3_json`, or JSON without a marker",
    "nemotron_deci": "a JSON list between `<TOOLCALL>` and `</TOOLCALL>`",
    "llama3_json": "JSON after `<\\|python_tag\\|>`, several separated by `;`",
    "mistral": "a JSON list after `[TOOL_CALLS]`, or `[TOOL_CALLS]name[ARGS]{…}` for each call",
    "jamba": "a JSON list between `<tool_calls>` and `</tool_calls>`",
    "phi4": "a JSON list after `functools`",
    "inkling": "a message marked `<\\|content_invoke_tool_json\\|>` with one JSON object, whose arguments are called `args`",
    "qwen3_coder": "tags `<function=…>` and `<parameter=…>`, values on separate lines, in `<tool_call>` or without it",
    "qwen3": "depending on the content of `<tool_call>`: JSON as in `hermes`, or tags as in `qwen3_coder`",
    "minimax_m2": "tags `<invoke name=…>` and `<parameter name=…>` in `<minimax:tool_call>` or without it",
    "deepseek_v3_2": 'DSML, the block called `function_calls`; `string="true"` marks strings',
    "deepseek_v4": "DSML, the block called `tool_calls`",
    "deepseek_v41": "DSML, the block called `calls`, with a space in every tag; a call may contain one JSON object instead of parameters",
    "muse": "a message to the tool with tags of the namespace `atem`",
    "deepseek_v3": "the name, then the arguments as JSON in a fence",
    "deepseek_v3_1": "the name, then the arguments as JSON",
    "kimi_k2": "`functions.name:number`, then the arguments as JSON; the number becomes the call's id. Section markers in singular or plural, or none",
    "glm45": "the name, then alternating keys and values, each on a line",
    "glm47": "the same on one line; both names accept both forms",
    "gemma4": 'bare keys, strings between `<\\|"\\|>`',
    "kimi_k3": "XTML: every argument is tagged with its type",
    "minimax_m3": "tags with a token before each; parameters are nested tags with the parameters' names",
    "pythonic": "a list of calls as Python writes them, keywords only",
    "harmony": "messages in gpt-oss's channels; parses reasoning as well",
}
"""Descriptions of the tool call formats."""

CALLS_HEAD = """## Tool calls

| name | also | format |
|---|---|---|"""

EXAMPLES_HEAD = """What a model writes to call `get_weather(city="Oslo", days=2)`:"""

THOUGHTS_HEAD = """## Reasoning

*Inside*: unless the prompt or the request determines it, the text is assumed to begin inside the reasoning. Each example has the reasoning "two and two"
and the content "Four.".

| name | also | inside | example |
|---|---|---|---|"""


def main() -> int:
    """Rewrite the page."""
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


def page(before: str) -> str:
    """Return the page with the current families."""
    head, _, rest = before.partition(BEGIN)
    return f"{head}{BEGIN}\n\n{families()}\n\n{END}{rest.partition(END)[2]}"


def families() -> str:
    """Return all families."""
    calls, thoughts = named(TOOL_CALLS), named(REASONING)
    table = [f"| `{one.name}` | {also(one)} | {FORMATS[one.name]} |" for one in calls]
    examples = [f"`{one.name}`\n\n{block(one.example)}" for one in calls]
    lines = [
        f"| `{one.name}` | {also(one)} | {'yes' if one.starts_inside else ''} | {line(one.example)} |"
        for one in thoughts
    ]
    parts = ["\n".join([CALLS_HEAD, *table]), EXAMPLES_HEAD, *examples, "\n".join([THOUGHTS_HEAD, *lines])]
    return "\n\n".join(parts)


def named(table: Mapping[str, F]) -> list[F]:
    """Return every family once."""
    return list({one.name: one for one in table.values()}.values())


def also(family: ToolCallFamily | ReasoningFamily) -> str:
    """Return its other names."""
    return ", ".join(f"`{alias}`" for alias in family.aliases)


def block(example: str) -> str:
    """Return an example of several lines."""
    fence = "````" if "```" in example else "```"
    return f"{fence}\n{example}\n{fence}"


def line(example: str) -> str:
    """Return an example in a table."""
    escaped = example.replace("|", "\\|").replace("\n", "⏎")
    return f"`{escaped}`"


if __name__ == "__main__":
    sys.exit(main())
