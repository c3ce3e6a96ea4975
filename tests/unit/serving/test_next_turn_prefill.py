"""Prefill of a conversation's next turn, computed in advance."""

import pytest
from tests.scripted_engine.script import Script
from tests.scripted_engine.stack import ScriptedStackPool

WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "%s"}}\n</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
def test_speculative_prefill_sends_the_prompt_of_the_next_turn(stacks: ScriptedStackPool, stream: bool) -> None:
    stack = stacks.parsed
    tokenizer = stack.models.find("m", "Chat").preprocessor.tokenizer
    hints = {"agent_hints": {"speculative_prefill": True}}
    script = Script(["<think>hm</think>Let me look." + CALL % "Oslo"])
    stacks.run(stack.chat(script, stream=stream, tools=[WEATHER], nvext=hints))
    stacks.run(stack.wait_requested("speculative_prefill"))
    ahead = stack.engine.requests[-1]
    assert (ahead.model, ahead.stop_conditions.max_tokens) == ("speculative_prefill", 1)
    prompt = tokenizer.decode(ahead.token_ids, skip_special_tokens=False)
    assert prompt.endswith(f"<|im_start|>assistant\nLet me look.\n{CALL % 'Oslo'}<|im_end|>\n")
    stack.engine.requests.clear()


def test_speculative_prefill_is_skipped_for_several_choices(stacks: ScriptedStackPool) -> None:
    stack = stacks.parsed
    hints = {"agent_hints": {"speculative_prefill": True}}
    stacks.run(stack.chat(Script(["a", "b"]), n=2, nvext=hints))
    stacks.run(stack.chat(Script(["x"])))
    assert all(request.model == "m" for request in stack.engine.requests)
