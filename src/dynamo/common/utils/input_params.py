"""The prompt of a request: rendered messages, encoded text, or token ids."""

from typing import Any

from dynamo.common.utils.token_ids import token_ids_to_list

RESERVED = ("tokenize", "add_generation_prompt")
"""Arguments of chat templates that a request cannot set."""


def resolve_thinking_token_budget(request: dict[str, Any]) -> Any | None:
    """Return `thinking_token_budget`, or its former name in `nvext`."""
    budget = request.get("thinking_token_budget")
    return (request.get("nvext") or {}).get("max_thinking_tokens") if budget is None else budget


def _inject_reasoning_content(messages: list[dict[str, Any]]) -> None:
    """Move the reasoning of assistant messages into their content, for templates without reasoning."""
    for message in messages:
        reasoning = message.get("reasoning_content")
        if message.get("role") != "assistant" or not isinstance(reasoning, str | list):
            continue
        segments = [reasoning] if isinstance(reasoning, str) else reasoning
        thought = "".join(f"<think>{segment}</think>" for segment in segments if segment)
        if not thought:
            continue
        content = message.get("content")
        if isinstance(content, list):
            message["content"] = [{"type": "text", "text": thought}, *content]
        else:
            message["content"] = thought + content if isinstance(content, str) else thought
        del message["reasoning_content"]


class InputParamManager:
    """Prompts of requests, with a tokenizer where one is needed."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def get_input_param(self, request: dict[str, Any], use_tokenizer: bool) -> Any | None:
        """Return the rendered messages or encoded text, or without the tokenizer the token ids. Raise `ValueError`."""
        if not use_tokenizer:
            return token_ids_to_list(request.get("token_ids"))
        if self.tokenizer is None:
            raise ValueError("Tokenizer is not available")
        if "messages" in request:
            return self._render(request)
        for name in ("prompt", "text"):
            if name in request:
                return self.tokenizer.encode(request[name])
        raise ValueError("No input parameter found in request: expected messages, prompt or text")

    def _render(self, request: dict[str, Any]) -> Any:
        arguments = {**request.get("chat_template_kwargs", {}), **request.get("chat_template_args", {})}
        for name in RESERVED:
            arguments.pop(name, None)
        if "reasoning_content" not in (getattr(self.tokenizer, "chat_template", "") or ""):
            _inject_reasoning_content(request["messages"])
        return self.tokenizer.apply_chat_template(
            request["messages"], tokenize=False, add_generation_prompt=True, **arguments
        )
