"""Conversion of Responses API requests to chat requests, and to the response object that repeats them. Pure.

Fields with an equivalent in a chat are converted; a field that would change the answer and has none is refused by name.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
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
from dynamo.api.responses.compaction import SUMMARY_HEAD, unsealed_summary
from dynamo.core.errors import InvalidArgument
from dynamo.protocols.openai import (
    ChatCompletionRequest,
    ChatMessage,
    ContentPart,
    FunctionCall,
    ResponseFormat,
    ToolCall,
    validate_chat,
)
from dynamo.protocols.response_items import (
    CompactionItem,
    FunctionCallItem,
    FunctionOutputItem,
    InputImage,
    InputText,
    MessageItem,
    OutputText,
    ReasoningItem,
    Refusal,
    StoredItem,
)
from dynamo.protocols.response_requests import (
    AllowedTools,
    ChosenFunction,
    FunctionTool,
    JsonObjectFormat,
    ResponseRequest,
    ResponsesPromptFields,
    SchemaFormat,
    TextFormat,
    TextOptions,
)
from dynamo.protocols.responses import Response, ShownReasoning, ShownTool
from dynamo.protocols.strict import INVALID, MALFORMED, refuse

METADATA_PAIRS_MAX = 16  # OpenAI's limits, as are the next two.
METADATA_KEY_CHARS_MAX = 64
METADATA_VALUE_CHARS_MAX = 512
TOP_LOGPROBS_MAX = 20

LOGPROBS = "message.output_text.logprobs"

PARAMETERS: Mapping[str, str] = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "chat_template_kwargs": "text.verbosity",
}
"""Field of the Responses API request, by the chat field it was converted to; used in error messages."""


def to_chat(request: ResponsesPromptFields, items: Iterable[StoredItem]) -> ChatCompletionRequest:
    """Return the chat request for these items. Raise `InvalidArgument`."""
    refuse_prompt(request)
    messages = [] if request.instructions is None else [ChatMessage(role="system", content=request.instructions)]
    messages += messages_of(items)
    if request.model is None:
        raise InvalidArgument(f"{MALFORMED}missing field `model`", param="model")
    chat = ChatCompletionRequest(model=request.model, messages=messages)
    choose_tools(request, chat)
    chat.parallel_tool_calls = request.parallel_tool_calls
    if request.reasoning is not None:
        chat.reasoning_effort = request.reasoning.effort
    if request.text is not None:
        chat.response_format = response_format(request.text)
        if request.text.verbosity is not None:
            chat.chat_template_kwargs = {"verbosity": request.text.verbosity}
    if isinstance(request, ResponseRequest):
        sample(request, chat)
    validate_chat(chat)
    return chat


def sample(request: ResponseRequest, chat: ChatCompletionRequest) -> None:
    """Set the sampling fields of the chat, which do not change the prompt. Raise `InvalidArgument`."""
    refuse_answer(request)
    chat.stream = request.stream
    chat.max_completion_tokens = request.max_output_tokens
    chat.temperature = request.temperature
    chat.top_p = request.top_p
    chat.top_k = request.top_k
    chat.min_p = request.min_p
    chat.seed = request.seed
    chat.stop = request.stop
    chat.frequency_penalty = request.frequency_penalty
    chat.presence_penalty = request.presence_penalty
    chat.repetition_penalty = request.repetition_penalty
    if request.response_format is not None:
        if chat.response_format is not None:
            refuse("response_format", "and `text.format` are mutually exclusive")
        chat.response_format = request.response_format
    chat.logprobs = wants_logprobs(request) or None
    chat.top_logprobs = request.top_logprobs
    chat.nvext = request.nvext
    chat.user = request.user
    chat.metadata = request.metadata
    chat.service_tier = request.service_tier
    chat.prompt_cache_key = request.prompt_cache_key


def wants_logprobs(request: ResponseRequest) -> bool:
    """Return whether the text includes the log-probabilities of its tokens."""
    return bool(request.top_logprobs) or LOGPROBS in (request.include or ())


def to_response(request: ResponseRequest, response_id: str, created: int, *, is_stored: bool) -> Response:
    """Return the initial response object: the request's fields, without output."""
    text = request.text or TextOptions()
    response = Response(
        id=response_id,
        created_at=created,
        model=request.model or "",
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        metadata=request.metadata or {},
        previous_response_id=request.previous_response_id,
        prompt_cache_key=request.prompt_cache_key,
        prompt_cache_retention=request.prompt_cache_retention,
        reasoning=shown_reasoning(request),
        safety_identifier=request.safety_identifier,
        store=is_stored,
        text=TextOptions(format=text.format or TextFormat(), verbosity=text.verbosity),
        tools=[shown_tool(tool) for tool in request.tools or ()],
        top_logprobs=request.top_logprobs or 0,
        truncation=request.truncation or "disabled",
        user=request.user,
    )
    for name in ECHOED:
        value = getattr(request, name)
        if value is not None:
            setattr(response, name, value)
    return response


ECHOED = (
    "temperature",
    "top_p",
    "frequency_penalty",
    "presence_penalty",
    "parallel_tool_calls",
    "service_tier",
    "tool_choice",
)  # fmt: skip
"""Fields that the response repeats, or shows with the API's default."""


def shown_tool(tool: FunctionTool) -> ShownTool:
    """Return a tool in the form of the response."""
    return ShownTool(tool.name, tool.parameters, tool.description, tool.strict is not False)


def shown_reasoning(request: ResponseRequest) -> ShownReasoning | None:
    """Return the reasoning options in the form of the response."""
    reasoning = request.reasoning
    return None if reasoning is None else ShownReasoning(reasoning.effort, reasoning.summary)


# ---- the conversation -----------------------------------------------------------------------------------------------


def messages_of(items: Iterable[StoredItem]) -> list[ChatMessage]:
    """Return the chat messages of items. Consecutive reasoning, text and calls of the assistant form one message."""
    messages: list[ChatMessage] = []
    turn: ChatMessage | None = None
    """The assistant's message that may still be extended."""
    for item in items:
        match item:
            case ReasoningItem():
                turn = turn if turn is not None and not (turn.content or turn.tool_calls) else _assistant(messages)
                turn.reasoning_content = (turn.reasoning_content or "") + thoughts_of(item)
            case FunctionCallItem():
                turn = turn or _assistant(messages)
                call = ToolCall(function=FunctionCall(name=item.name, arguments=item.arguments), id=item.call_id)
                turn.tool_calls = [*(turn.tool_calls or ()), call]
            case MessageItem(role="assistant"):
                turn = turn if turn is not None and not (turn.content or turn.tool_calls) else _assistant(messages)
                turn.content = content_of(item.content)
            case MessageItem():
                turn = None
                messages.append(ChatMessage(role=item.role, content=content_of(item.content)))
            case CompactionItem():
                turn = None
                messages.append(ChatMessage(role="user", content=SUMMARY_HEAD + unsealed_summary(item)))
            case FunctionOutputItem():
                turn = None
                messages.append(ChatMessage(role="tool", content=content_of(item.output), tool_call_id=item.call_id))
    return messages


def _assistant(messages: list[ChatMessage]) -> ChatMessage:
    turn = ChatMessage(role="assistant")
    messages.append(turn)
    return turn


def without_oldest(items: Sequence[StoredItem], count: int) -> list[StoredItem]:
    """Return the items without the first `count`, and without the results of calls among those."""
    kept = list(items[count:])
    calls = {item.call_id for item in kept if isinstance(item, FunctionCallItem)}
    return [item for item in kept if not isinstance(item, FunctionOutputItem) or item.call_id in calls]


def check_results(before: Iterable[StoredItem], input_items: Sequence[StoredItem]) -> None:
    """Raise `InvalidArgument` for the result of a call that is not in the continued conversation."""
    results = [item.call_id for item in input_items if isinstance(item, FunctionOutputItem)]
    if not results:
        return
    known = {item.call_id for item in (*before, *input_items) if isinstance(item, FunctionCallItem)}
    for call_id in results:
        if call_id not in known:
            raise InvalidArgument(
                f"{INVALID}No tool call found for function call output with call_id {call_id[:80]}.", param="input"
            )


def thoughts_of(item: ReasoningItem) -> str:
    """Return the reasoning text; its summary if that is all there is."""
    return "".join(part.text for part in item.content or ()) or "\n\n".join(part.text for part in item.summary)


def content_of(content: str | Sequence[InputText | InputImage | OutputText | Refusal]) -> str | list[ContentPart]:
    """Return a message's content in chat form: a string for a single text part."""
    if isinstance(content, str):
        return content
    if len(content) == 1 and isinstance(content[0], InputText | OutputText):
        return content[0].text
    return [_part(one) for one in content]


def _part(part: InputText | InputImage | OutputText | Refusal) -> ContentPart:
    match part:
        case InputText() | OutputText():
            return ContentPart(type="text", text=part.text)
        case Refusal():
            return ContentPart(type="refusal", refusal=part.refusal)
        case InputImage():
            if part.image_url is None:
                refuse("input_image.file_id", "is not supported by this release: send `image_url`")
            return image_part(part.image_url, part.detail)


# ---- tools and formats ----------------------------------------------------------------------------------------------


def choose_tools(request: ResponsesPromptFields, chat: ChatCompletionRequest) -> None:
    """Set the tools and the tool choice of the chat. Raise `InvalidArgument`."""
    tools = request.tools or []
    for number, tool in enumerate(tools):
        refuse_tool(tool, f"tools[{number}]")
    choice = request.tool_choice
    if isinstance(choice, AllowedTools):
        names = {name_of(tool, f"tool_choice.tools[{number}]") for number, tool in enumerate(choice.tools)}
        known_tools(names, tools)
        tools = [tool for tool in tools if tool.name in names]
        chat.tool_choice = choice.mode
    elif isinstance(choice, ChosenFunction):
        known_tools([choice.name], tools)
        chat.tool_choice = chosen_function(choice.name)
    else:
        chat.tool_choice = choice
    if tools:
        chat.tools = [function_tool(tool.name, tool.description, tool.parameters, strict=tool.strict) for tool in tools]


def name_of(tool: Mapping[str, Any], where: str) -> str:
    """Return the name of a function in a list of allowed tools."""
    if tool.get("type") != "function" or not isinstance(tool.get("name"), str):
        refuse(where, 'must be {"type": "function", "name": …}: other tools are not supported by this release')
    return str(tool["name"])


def known_tools(names: Iterable[str], tools: Sequence[FunctionTool]) -> None:
    """Raise `InvalidArgument` for a name that no tool has."""
    known = {tool.name for tool in tools}
    for name in names:
        if name not in known:
            raise InvalidArgument(f"{INVALID}tool_choice: no tool is named `{name[:80]}`", param="tool_choice")


def response_format(text: TextOptions) -> ResponseFormat | None:
    """Return the response format, None for free text."""
    match text.format:
        case JsonObjectFormat():
            return ResponseFormat(type="json_object")
        case SchemaFormat():
            schema = {"name": text.format.name, "schema": text.format.schema, "strict": text.format.strict}
            return ResponseFormat(type="json_schema", json_schema=schema)
    return None


# ---- unsupported fields ---------------------------------------------------------------------------------------------


def _is_no_default(*defaults: Any) -> Callable[[Any], bool]:
    return lambda value: value not in (None, *defaults)


REFUSED_PROMPT: UnsupportedFields = (
    ("conversation", _is_no_default(), "is not supported by this release: use `previous_response_id`"),
    ("personality", _is_no_default(), "is not supported by this release: use `instructions`"),
)
REFUSED_ANSWER: UnsupportedFields = (
    ("background", _is_no_default(False), UNSUPPORTED),
    ("max_tool_calls", _is_no_default(), "is not supported by this release: there are no built-in tools"),
    ("prompt", _is_no_default(), "is not supported by this release: there are no stored prompts"),
    ("context_management", _is_no_default([]), UNSUPPORTED),
    ("moderation", _is_no_default(), UNSUPPORTED),
    ("image", _is_no_default(), UNSUPPORTED),
    ("access_programs", _is_no_default(), UNSUPPORTED),
)


def refuse_prompt(request: ResponsesPromptFields) -> None:
    """Raise `InvalidArgument` for unsupported fields that would change the prompt."""
    refuse_fields(request, REFUSED_PROMPT)
    reasoning = request.reasoning
    if reasoning is not None and reasoning.context not in (None, "auto"):
        refuse("reasoning.context", "other than `auto` is not supported by this release: the chat template decides")
    if reasoning is not None and reasoning.mode not in (None, "standard"):
        refuse("reasoning.mode", "other than `standard` is not supported by this release")


def refuse_answer(request: ResponseRequest) -> None:
    """Raise `InvalidArgument` for unsupported fields that would change the answer, and for values out of range."""
    refuse_fields(request, REFUSED_ANSWER)
    if request.top_logprobs is not None and not 0 <= request.top_logprobs <= TOP_LOGPROBS_MAX:
        refuse("top_logprobs", f"must be between 0 and {TOP_LOGPROBS_MAX}, got {request.top_logprobs}")
    if request.stream_options is not None and not request.stream:
        refuse("stream_options", "is only allowed when `stream` is true")
    metadata = request.metadata or {}
    if len(metadata) > METADATA_PAIRS_MAX:
        refuse("metadata", f"must have at most {METADATA_PAIRS_MAX} pairs, got {len(metadata)}")
    for key, value in metadata.items():
        if len(key) > METADATA_KEY_CHARS_MAX or len(value) > METADATA_VALUE_CHARS_MAX:
            limits = f"{METADATA_KEY_CHARS_MAX} characters, values {METADATA_VALUE_CHARS_MAX}"
            refuse("metadata", f"keys may have {limits}: `{key[:METADATA_KEY_CHARS_MAX]}` is too long")


def refuse_tool(tool: FunctionTool, where: str) -> None:
    """Raise `InvalidArgument` for unsupported fields of a tool."""
    if tool.defer_loading:
        refuse(f"{where}.defer_loading")
    if tool.is_async:
        refuse(f"{where}.async")
    if tool.output_schema is not None:
        refuse(f"{where}.output_schema")
    refuse_callers(tool.allowed_callers, where)
