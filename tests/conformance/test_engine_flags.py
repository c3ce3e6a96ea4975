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


@pytest.mark.parametrize(
    ("engine", "config", "table"),
    [
        ("vllm", vllm.VllmConfig, vllm.UNSUPPORTED_FLAGS),
        ("sglang", sglang.SglangConfig, sglang.UNSUPPORTED_FLAGS),
        ("trtllm", trtllm.TrtllmConfig, trtllm.UNSUPPORTED_FLAGS),
    ],
)
def test_adapter_knows_the_flags_of_the_released_adapter(
    engine: str, config: type[Any], table: Sequence[UnsupportedFlag]
) -> None:
    (source,) = Path(require_peer()).parents[1].glob(f"lib/python*/site-packages/dynamo/{engine}/backend_args.py")
    released = set(FLAG.findall(source.read_text(encoding="utf-8")))
    known = declared_flags(config) | {name for one in table for name in (one.flag, *one.aliases)}
    assert sorted(released - known - EVERY_PARSER) == []
