"""Tool calls: one module for each group of formats; `FAMILIES` lists all of them."""

from dynamo.parsers import harmony
from dynamo.parsers.base import ToolCallFamily
from dynamo.parsers.tool_calls import (
    gemma4,
    glm,
    json_calls,
    kimi_k3,
    minimax_m3,
    named_calls,
    pythonic,
    tagged_calls,
)

FAMILIES: tuple[ToolCallFamily, ...] = (
    *json_calls.FAMILIES,
    *tagged_calls.FAMILIES,
    *named_calls.FAMILIES,
    *glm.FAMILIES,
    *gemma4.FAMILIES,
    *kimi_k3.FAMILIES,
    *minimax_m3.FAMILIES,
    *pythonic.FAMILIES,
    harmony.TOOL_CALLS,
)
