"""Routes of Anthropic's Messages API; without `--enable-anthropic-api` they return 404 and name the flag."""

import secrets
from functools import partial

from msgspec import Struct
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from dynamo.api.anthropic.convert import hides_thoughts, to_chat
from dynamo.api.anthropic.errors import error_body
from dynamo.api.anthropic.writer import MessageWriter
from dynamo.api.content_blocks import undecoded, whole_body
from dynamo.core.codec import json_encode
from dynamo.core.config import read_bool, setting
from dynamo.http.routes.table import ENGINE_REFUSALS, Operation, RouteContext, RouteTable
from dynamo.protocols.anthropic import (
    AnthropicMessage,
    ErrorMessage,
    MessageCountRequest,
    MessagesRequest,
    MessageTokens,
    decode_message_count,
    decode_messages,
)
from dynamo.protocols.openai import ChatCompletionRequest
from dynamo.serving.bodies import decoded
from dynamo.serving.endpoints import Surface
from dynamo.serving.errors import ErrorAnswer
from dynamo.serving.models import Models
from dynamo.serving.pipeline import Pipeline
from dynamo.serving.prompt_count import count_prompt, counted_model
from dynamo.serving.response_stream import ResponseStream

PATH, VARIABLE = "/v1/messages", "DYN_HTTP_SVC_ANTHROPIC_PATH"
OFF = ErrorAnswer(
    404,
    "Anthropic's Messages API is disabled: start the frontend with --enable-anthropic-api (DYN_ENABLE_ANTHROPIC_API=1)",
)


def add(routes: RouteTable, context: RouteContext) -> None:
    """Add the routes."""
    if not context.apis.enable_anthropic:
        off = Operation("Create a message (disabled: --enable-anthropic-api)", refusals=(404,), error=ErrorMessage)
        routes.plain("POST", PATH, switched_off, off, variable=VARIABLE)
        routes.plain("POST", f"{PATH}/count_tokens", switched_off, off)
        return
    pages = MessagePages(
        context.pipeline,
        context.models,
        context.apis.strip_anthropic_preamble,
        setting("DYN_IGNORE_OPENAI_FE_UNSUPPORTED_FIELDS", False, read_bool),
    )
    routes.hot(
        "POST",
        PATH,
        pages.handle_message,
        Operation(
            "Create a message",
            MessagesRequest,
            AnthropicMessage,
            streams=True,
            refusals=ENGINE_REFUSALS,
            error=ErrorMessage,
        ),
        variable=VARIABLE,
        error_body=error_body,
    )
    routes.hot(
        "POST",
        f"{PATH}/count_tokens",
        pages.handle_count,
        Operation(
            "Count the tokens of a message",
            MessageCountRequest,
            MessageTokens,
            refusals=ENGINE_REFUSALS,
            error=ErrorMessage,
        ),
        error_body=error_body,
    )


async def switched_off(request: Request) -> Response:
    """Refuse a request to a disabled API."""
    return Response(error_body(OFF), OFF.status, media_type="application/json")


class MessagePages(Struct, frozen=True):
    """Handlers of the Messages API."""

    pipeline: Pipeline
    models: Models
    strips_preamble: bool
    ignores_unknown: bool

    def handle_message(self, exchange: ResponseStream) -> None:
        """POST /v1/messages."""
        name(exchange)
        self.pipeline.start(exchange, UNREAD, self._answer(exchange))

    def handle_count(self, exchange: ResponseStream) -> None:
        """POST /v1/messages/count_tokens."""
        name(exchange)
        self.pipeline.start(exchange, UNREAD, self._count(exchange))

    async def _answer(self, exchange: ResponseStream) -> None:
        request, chat = await decoded(exchange.body, self._message, "messages")
        writer = partial(writer_of, request)
        await self.pipeline.serve(exchange, chat, replace(UNREAD, chunks=writer, body=partial(whole_body, writer)))

    async def _count(self, exchange: ResponseStream) -> None:
        chat = await decoded(exchange.body, self._counted, "count_tokens")
        preprocessor = counted_model(self.models, chat.model, exchange.account).preprocessor
        exchange.respond(200, json_encode(MessageTokens(await count_prompt(preprocessor, chat, len(exchange.body)))))

    def _message(self, body: bytes) -> tuple[MessagesRequest, ChatCompletionRequest]:
        request = decode_messages(body, ignore_unknown=self.ignores_unknown)
        return request, to_chat(request, strip_preamble=self.strips_preamble)

    def _counted(self, body: bytes) -> ChatCompletionRequest:
        request = decode_message_count(body, ignore_unknown=self.ignores_unknown)
        return to_chat(request, strip_preamble=self.strips_preamble)


def name(exchange: ResponseStream) -> None:
    """Set the `request-id` header, which Anthropic's clients read."""
    exchange.header_bytes += b"request-id: req_%b\r\n" % secrets.token_hex(12).encode()


def writer_of(request: MessagesRequest, message_id: str, model: str, created: int) -> MessageWriter:
    """Return the writer of a streamed message."""
    stop = request.stop_sequences or ()
    return MessageWriter(message_id, model, stop_sequences=stop, hides_thoughts=hides_thoughts(request))


UNREAD = Surface(
    endpoint="anthropic_messages",
    model_type="Chat",
    response_id=lambda request_id: f"msg_{request_id.replace('-', '')}",
    chunks=undecoded,
    body=undecoded,
    error_body=error_body,
    always_usage=True,
)
"""Surface of messages until their request is decoded."""
