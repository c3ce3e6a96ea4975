"""Documentation: the allowed blocks, and the reasons why some are not executed."""

import re
import textwrap

import pytest
from tests.documentation.blocks import PAGES, Block, blocks, commands, page_blocks

BLOCKS = [block for page in PAGES for block in page_blocks(page)]
SHELL = [block for block in BLOCKS if block.language == "sh"]
NOT_RUN = [block for block in SHELL if block.not_run]
REASONS = {
    "is the test suite itself": r"^make test$",
    "needs SGLang": r"sglang",
    "needs TensorRT-LLM": r"trtllm",
    "needs Docker": r"docker build",
    "needs a Kubernetes cluster": r"helm install",
    "needs a NATS server with JetStream": r"durable-kv-events",
    "needs a ZMQ broker on another host": r"tcp://broker:",
    "needs another host": r"https://api\.example\.com",
    "needs etcd on other hosts": r"ETCD_ENDPOINTS=http://10\.",
    "needs llama.cpp": r"llama-server",
    "needs vLLM": r"dynamo\.vllm|vllm serve",
    "takes hours": r"routing_quality",
    "takes minutes": r"make simulate",
}
"""Reasons for not executing a block, and the pattern that the block must contain for each."""
NOT_RUN_MAX = 18  # Each further entry needs a comparable reason.
COMMAND = re.compile(
    r"^(\$ |(\S+=\S+ )*(\.venv/bin/\S+|python3? -m|dynamo|make|pip|curl|export|vllm|nats-server)\s)", re.MULTILINE
)


@pytest.mark.parametrize("block", NOT_RUN, ids=lambda block: block.name)
def test_block_that_is_not_run_has_a_known_reason_that_applies(block: Block) -> None:
    assert block.not_run in REASONS
    assert re.search(REASONS[block.not_run], block.text), f"{block.name}: nothing in it {block.not_run}"


def test_number_of_blocks_that_are_not_run_does_not_grow() -> None:
    assert len(NOT_RUN) <= NOT_RUN_MAX
    assert {block.not_run for block in NOT_RUN} == set(REASONS)


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language != "sh"], ids=lambda block: block.name)
def test_commands_are_in_blocks_that_are_run(block: Block) -> None:
    assert block.language not in {"bash", "console", "shell"}, f"{block.name}: write ```sh"
    if not block.language:
        assert not COMMAND.search(block.text), f"{block.name}: a command in a block without language; write ```sh"


@pytest.mark.parametrize("block", SHELL, ids=lambda block: block.name)
def test_documented_commands_name_the_interpreter_of_the_clone(block: Block) -> None:
    for command in commands(block.text):
        bare = re.search(
            r"(?<![\w./-])(python3? -m (?!sglang)|pip install|dynamo (serve|chat|route|plan|replay))", command.text
        )
        assert bare is None, f"{block.name}: `{bare and bare[0]}` is not on the reader's PATH; write .venv/bin/…"
        assert "dynamo-serve[" not in command.text, f"{block.name}: nothing is published; write -e '.[extra]'"


def test_block_is_found_with_its_marker_line_and_language() -> None:
    page = textwrap.dedent("""\
        Text
        <!-- not run: needs vLLM -->
        ```sh
        vllm serve
        ```
        <!-- given: trace.jsonl -->

        ````
        ```
        ````
        """)
    first, second = blocks("p.md", page)
    assert (first.name, first.language, first.text, first.not_run, first.given) == (
        "p.md:3",
        "sh",
        "vllm serve",
        "needs vLLM",
        None,
    )
    assert (second.language, second.text, second.given) == ("", "```", None), "a marker is on the line before its fence"


def test_commands_are_joined_across_lines_and_servers_are_known() -> None:
    found = commands(
        "a \\\n  b\n# comment\n\ncurl -d '{\n}'\n.venv/bin/dynamo serve  # all\n.venv/bin/dynamo serve --help\nx &   # y\n"
    )
    assert [(command.text, command.is_server) for command in found] == [
        ("a \\\n  b", False),
        ("curl -d '{\n}'", False),
        (".venv/bin/dynamo serve  # all", True),
        (".venv/bin/dynamo serve --help", False),
        ("x &   # y", True),
    ]
