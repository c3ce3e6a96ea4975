"""Prefill of a conversation's next turn, computed in advance."""

import pytest
from tests.scripted_engine.house import Street
from tests.scripted_engine.script import Script

WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "%s"}}\n</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
def test_speculative_prefill_sends_the_prompt_of_the_next_turn(street: Street, stream: bool) -> None:
    house = street.parsed
    tokenizer = house.models.find("m", "Chat").preprocessor.tokenizer
    hints = {"agent_hints": {"speculative_prefill": True}}
    script = Script(["<think>hm</think>Let me look." + CALL % "Oslo"])
    street.run(house.chat(script, stream=stream, tools=[WEATHER], nvext=hints))
    street.run(house.asked("speculative_prefill"))
    ahead = house.engine.requests[-1]
    assert (ahead.model, ahead.stop_conditions.max_tokens) == ("speculative_prefill", 1)
    prompt = tokenizer.decode(ahead.token_ids, skip_special_tokens=False)
    assert prompt.endswith(f"<|im_start|>assistant\nLet me look.\n{CALL % 'Oslo'}<|im_end|>\n")
    house.engine.requests.clear()


def test_speculative_prefill_is_skipped_for_several_choices(street: Street) -> None:
    house = street.parsed
    hints = {"agent_hints": {"speculative_prefill": True}}
    street.run(house.chat(Script(["a", "b"]), n=2, nvext=hints))
    street.run(house.chat(Script(["x"])))
    assert all(request.model == "m" for request in house.engine.requests)
