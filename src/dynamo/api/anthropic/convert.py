"""Conversion of Messages API requests to chat requests. Pure.

Fields with an equivalent in a chat are converted; a field that would change the answer and has none is refused by name.
Cache control marks are accepted and have no effect: the KV cache finds shared prefixes by itself.
"""

import re
from collections.abc import Sequence
from typing import Any

from dynamo.api.chat_parts import (
    UNSUPPORTED,
    UnsupportedFields,
    chosen_function,
    function_tool,
    image_part,
    refuse_callers,
    refuse_fields,
)
from dynamo.api.sealed_text import unsealed
from dynamo.core.codec import json_encode
from dynamo.core.errors import InvalidArgument
from dynamo.protocols.anthropic import (
    AnthropicPromptFields,
    AnyChoice,
    Base64Source,
    CustomTool,
    DocumentBlock,
    ImageBlock,
    InputBlock,
    InputMessage,
    JsonOutput,
    MessagesRequest,
    NamedChoice,
    NoChoice,
    RedactedThinkingBlock,
    ResultPart,
    TextBlock,
    ThinkingBlock,
    ThinkingDisabled,
    ThinkingEnabled,
    ToolResultBlock,
    ToolUseBlock,
)
from dynamo.protocols.openai import (
    ChatCompletionRequest,
    ChatMessage,
    ContentPart,
    FunctionCall,
    ResponseFormat,
    ToolCall,
    validate_chat,
)
from dynamo.protocols.strict import INVALID, refuse

BUDGET_MIN = 1024  # Anthropic's minimum.
SYSTEM_SEPARATOR = "\n"  # Between the blocks of `system`, as upstream.
PREAMBLE = re.compile(r"x-anthropic-billing-header:[^\n]*(?:\n|$)")
"""Line that some clients prepend to their system prompt. It differs per request and would defeat prefix caching."""
SEALED = "sealed:"
"""Prefix of a signature that contains the reasoning text, for clients that requested hidden reasoning."""
KEEP_THOUGHTS = "clear_thinking_"
"""Prefix of context edits for old reasoning, which are ignored: the chat template decides which reasoning is shown."""


def to_chat(request: AnthropicPromptFields, *, strip_preamble: bool = True) -> ChatCompletionRequest:
    """Return the chat request for the prompt. Raise `InvalidArgument`."""
    refuse_prompt(request)
    messages = system_messages(request.system, strip_preamble=strip_preamble)
    turns = [turn for number, one in enumerate(request.messages) for turn in turns_of(one, f"messages[{number}]")]
    if not turns:
        refuse("messages", "must not be empty")
    messages += turns
    chat = ChatCompletionRequest(model=request.model, messages=messages)
    continue_final(request.messages[-1], chat)
    choose_tools(request, chat)
    think(request, chat)
    chat.response_format = response_format(request)
    if isinstance(request, MessagesRequest):
        sample(request, chat)
    validate_chat(chat)
    return chat


def sample(request: MessagesRequest, chat: ChatCompletionRequest) -> None:
    """Set the sampling fields of the chat, which do not change the prompt. Raise `InvalidArgument`."""
    refuse_answer(request)
    chat.stream = request.stream
    chat.max_tokens = request.max_tokens
    chat.stop = request.stop_sequences or None
    chat.temperature = request.temperature
    chat.top_p = request.top_p
    chat.top_k = request.top_k
    chat.nvext = request.nvext
    chat.user = None if request.metadata is None else request.metadata.user_id
    chat.service_tier = request.service_tier


# ---- the conversation -----------------------------------------------------------------------------------------------


def system_messages(system: str | Sequence[TextBlock] | None, *, strip_preamble: bool) -> list[ChatMessage]:
    """Return the system prompt as one message, or none."""
    if system is None:
        return []
    texts = [system] if isinstance(system, str) else [block.text for block in system]
    if strip_preamble:
        texts = [without_preamble(text) for text in texts]
    text = SYSTEM_SEPARATOR.join(one for one in texts if one)
    return [ChatMessage(role="system", content=text)] if text else []


def without_preamble(text: str) -> str:
    """Return the text without the client's billing line at its beginning."""
    match = PREAMBLE.match(text)
    return text[match.end() :] if match else text


def turns_of(message: InputMessage, where: str) -> list[ChatMessage]:
    """Return the chat messages of one message; tool results become messages of their own."""
    if isinstance(message.content, str):
        return [ChatMessage(role=message.role, content=message.content)]
    if message.role == "assistant":
        return assistant_turn(message.content, where)
    turns: list[ChatMessage] = []
    spoken: list[InputBlock] = []
    for number, block in enumerate(message.content):
        if isinstance(block, ToolResultBlock):
            turns += speaker_turn(message.role, spoken)
            spoken = []
            turns.append(ChatMessage(role="tool", content=result_of(block), tool_call_id=block.tool_use_id))
        elif isinstance(block, TextBlock | ImageBlock | DocumentBlock):
            spoken.append(block)
        elif not isinstance(block, RedactedThinkingBlock):
            refuse(f"{where}.content[{number}].type", f"is not for the role `{message.role}`")
    return turns + speaker_turn(message.role, spoken)


def speaker_turn(role: Any, blocks: Sequence[InputBlock]) -> list[ChatMessage]:
    """Return the message of a user or the system; none for empty content."""
    return [ChatMessage(role=role, content=content_of(blocks))] if blocks else []


def assistant_turn(blocks: Sequence[InputBlock], where: str) -> list[ChatMessage]:
    """Return the assistant's message: reasoning, text and tool calls. Reasoning signed by another server is dropped."""
    turn = ChatMessage(role="assistant")
    thoughts: list[str] = []
    spoken: list[InputBlock] = []
    calls: list[ToolCall] = []
    for number, block in enumerate(blocks):
        match block:
            case ThinkingBlock():
                thoughts.append(block.thinking or unsealed(SEALED, block.signature) or "")
            case TextBlock():
                spoken.append(block)
            case ToolUseBlock():
                arguments = json_encode(block.input).decode()
                calls.append(ToolCall(function=FunctionCall(name=block.name, arguments=arguments), id=block.id))
            case RedactedThinkingBlock():
                pass
            case _:
                refuse(f"{where}.content[{number}].type", "is not for the role `assistant`")
    if not (thoughts or spoken or calls):
        return []
    turn.reasoning_content = "".join(thoughts) or None
    turn.content = content_of(spoken) if spoken else None
    turn.tool_calls = calls or None
    return [turn]


def result_of(block: ToolResultBlock) -> str | list[ContentPart]:
    """Return a tool's result. Chat templates cannot mark a failed call, so the failure is stated in the text."""
    if block.content is None:
        return ""
    return block.content if isinstance(block.content, str) else content_of(block.content)


def content_of(blocks: Sequence[InputBlock | ResultPart]) -> str | list[ContentPart]:
    """Return blocks as chat content: a string for a single text block."""
    if not blocks:
        return ""
    if len(blocks) == 1 and isinstance(blocks[0], TextBlock):
        return blocks[0].text
    return [_part(block) for block in blocks]


def _part(block: InputBlock | ResultPart) -> ContentPart:
    match block:
        case ImageBlock():
            source = block.source
            url = f"data:{source.media_type};base64,{source.data}" if isinstance(source, Base64Source) else source.url
            return image_part(url)
        case DocumentBlock():
            if isinstance(block.citations, dict) and block.citations.get("enabled"):
                refuse("document.citations")
            parts = (block.title, block.context, block.source.data)
            return ContentPart(type="text", text="\n\n".join(part for part in parts if part))
        case TextBlock():
            return ContentPart(type="text", text=block.text)
    raise AssertionError(f"{type(block).__name__} is not a part of a message")


def continue_final(final: InputMessage, chat: ChatCompletionRequest) -> None:
    """Continue the answer begun by the client, as Anthropic does. Raise `InvalidArgument`."""
    turn = chat.messages[-1]
    if final.role != "assistant" or turn.role != "assistant":
        return
    if turn.tool_calls:
        refuse("messages", "must not end with a `tool_use` block: its result is missing")
    if turn.content:
        chat.continue_final_message = True
        chat.add_generation_prompt = False


# ---- tools, reasoning and formats -----------------------------------------------------------------------------------


def choose_tools(request: AnthropicPromptFields, chat: ChatCompletionRequest) -> None:
    """Set the tools and the tool choice of the chat. Raise `InvalidArgument`."""
    tools = request.tools or []
    for number, tool in enumerate(tools):
        refuse_tool(tool, f"tools[{number}]")
    if tools:
        chat.tools = [chat_tool(tool) for tool in tools]
    choice = request.tool_choice
    if choice is None:
        return
    match choice:
        case NoChoice():
            chat.tool_choice = "none"
        case AnyChoice():
            chat.tool_choice = "required"
        case NamedChoice():
            if all(tool.name != choice.name for tool in tools):
                refuse("tool_choice", f"names `{choice.name[:80]}`, which is none of the tools")
            chat.tool_choice = chosen_function(choice.name)
        case _:
            chat.tool_choice = "auto" if tools else None
    if not isinstance(choice, NoChoice) and choice.disable_parallel_tool_use:
        chat.parallel_tool_calls = False


def chat_tool(tool: CustomTool) -> dict[str, Any]:
    """Return the tool in chat form."""
    return function_tool(
        tool.name, tool.description, tool.input_schema or {}, strict=tool.strict, input_examples=tool.input_examples
    )


def think(request: AnthropicPromptFields, chat: ChatCompletionRequest) -> None:
    """Set whether and how much the model reasons; without the field, the chat template decides."""
    if request.output_config is not None:
        chat.reasoning_effort = request.output_config.effort
    thinking = request.thinking
    if thinking is None:
        return
    if isinstance(thinking, ThinkingDisabled):
        chat.thinking = False
        return
    chat.thinking = True
    chat.chat_template_kwargs = {"truncate_history_thinking": False}  # Keep the reasoning that the client sent back.
    if isinstance(thinking, ThinkingEnabled) and thinking.budget_tokens < BUDGET_MIN:
        refuse("thinking.budget_tokens", f"must be at least {BUDGET_MIN}, got {thinking.budget_tokens}")


def hides_thoughts(request: AnthropicPromptFields) -> bool:
    """Return whether the client requested hidden reasoning."""
    thinking = request.thinking
    return thinking is not None and not isinstance(thinking, ThinkingDisabled) and thinking.display == "omitted"


def response_format(request: AnthropicPromptFields) -> ResponseFormat | None:
    """Return the response format, None for free text."""
    given = request.output_format if request.output_config is None else request.output_config.format
    wanted: JsonOutput | None = given or request.output_format
    if wanted is None:
        return None
    return ResponseFormat(type="json_schema", json_schema={"name": "output", "schema": wanted.schema, "strict": True})


# ---- unsupported fields ---------------------------------------------------------------------------------------------


REFUSED_PROMPT: UnsupportedFields = (("mcp_servers", bool, UNSUPPORTED),)
REFUSED_ANSWER: UnsupportedFields = tuple(
    (name, lambda value: value is not None, UNSUPPORTED) for name in ("container", "diagnostics", "inference_geo")
)


def refuse_prompt(request: AnthropicPromptFields) -> None:
    """Raise `InvalidArgument` for unsupported fields that would change the prompt."""
    refuse_fields(request, REFUSED_PROMPT)
    edits = request.context_management.get("edits") if isinstance(request.context_management, dict) else None
    for edit in edits if isinstance(edits, list) else ():
        kind = edit.get("type") if isinstance(edit, dict) else None
        if not isinstance(kind, str) or not kind.startswith(KEEP_THOUGHTS):
            refuse("context_management.edits", f"`{str(kind)[:80]}` is not supported by this release")


def refuse_answer(request: MessagesRequest) -> None:
    """Raise `InvalidArgument` for unsupported fields that would change the answer, and for values out of range."""
    refuse_fields(request, REFUSED_ANSWER)
    thinking = request.thinking
    if isinstance(thinking, ThinkingEnabled) and thinking.budget_tokens >= request.max_tokens:
        raise InvalidArgument(
            f"{INVALID}`max_tokens` must be greater than `thinking.budget_tokens`", param="thinking.budget_tokens"
        )


def refuse_tool(tool: CustomTool, where: str) -> None:
    """Raise `InvalidArgument` for unsupported fields of a tool."""
    if tool.type not in (None, "custom"):
        refuse(where, f"is a server tool of type `{str(tool.type)[:80]}`, which is not supported")
    if tool.input_schema is None:
        refuse(f"{where}.input_schema", "is missing")
    if tool.defer_loading:
        refuse(f"{where}.defer_loading")
    refuse_callers(tool.allowed_callers, where)
