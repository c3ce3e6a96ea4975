"""Flags of the released engine adapters and of ours: honoured, or refused by name unless they have their default."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.peers import require_peer

from dynamo.core.unsupported_flags import UnsupportedFlag, declared_flags
from dynamo.sglang import config as sglang
from dynamo.trtllm import config as trtllm
from dynamo.vllm import config as vllm

pytestmark = pytest.mark.conformance

FLAG = re.compile(r"""["'](--[a-z][a-z0-9-]+)["']""")

EVERY_PARSER = {"--version"}
"""Declared by the parser itself, not by a configuration."""


ADAPTERS = [
    ("vllm", vllm.VllmConfig, vllm.UNSUPPORTED_FLAGS),
    ("sglang", sglang.SglangConfig, sglang.UNSUPPORTED_FLAGS),
    ("trtllm", trtllm.TrtllmConfig, trtllm.UNSUPPORTED_FLAGS),
]


@pytest.mark.parametrize(("engine", "config", "table"), ADAPTERS)
def test_adapter_accepts_the_flags_of_the_released_adapter(
    engine: str, config: type[Any], table: Sequence[UnsupportedFlag]
) -> None:
    assert sorted(released(f"{engine}/backend_args.py") - known(config, table)) == []


@pytest.mark.parametrize(("engine", "config", "table"), ADAPTERS)
def test_adapter_accepts_the_flags_common_to_all_released_adapters(
    engine: str, config: type[Any], table: Sequence[UnsupportedFlag]
) -> None:
    shared = released("common/configuration/groups/runtime_args.py")
    positive = {flag for flag in shared if flag.replace("--no-", "--", 1) not in shared or not flag.startswith("--no-")}
    assert sorted(positive - known(config, table)) == []


def released(path: str) -> set[str]:
    """Return the flags in a module of the released package."""
    (source,) = Path(require_peer()).parents[1].glob(f"lib/python*/site-packages/dynamo/{path}")
    return set(FLAG.findall(source.read_text(encoding="utf-8"))) - EVERY_PARSER


def known(config: type[Any], table: Sequence[UnsupportedFlag]) -> set[str]:
    """Return the flags of an adapter, with those that it refuses by name."""
    return {*declared_flags(config), *(name for one in table for name in (one.flag, *one.aliases))}
