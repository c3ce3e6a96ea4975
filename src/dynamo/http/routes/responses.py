"""Routes of OpenAI's Responses API: responses, token counts, and stored responses."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from dynamo.api.content_blocks import undecoded, whole_body
from dynamo.api.responses.archive import PAGE, ResponseArchive, page_of, previous_not_found
from dynamo.api.responses.compaction import SUMMARY_REQUEST, SUMMARY_TOKENS_MAX, compacted
from dynamo.api.responses.convert import PARAMETERS, check_results, to_response, wants_logprobs
from dynamo.api.responses.echo import RequestEcho, echo_of, is_long_echo
from dynamo.api.responses.fitting import fitting_chat
from dynamo.api.responses.ids import new_response_id
from dynamo.api.responses.session import ResponseSession
from dynamo.api.responses.store import Dropped, MemoryResponseStore, ResponseStore
from dynamo.api.responses.writer import Keep, ResponseWriter
from dynamo.core.codec import json_encode
from dynamo.core.config import read_bool, setting
from dynamo.core.errors import DynamoException, InvalidArgument
from dynamo.core.threads import in_few_threads
from dynamo.http.routes.api_options import MEMORY, NOWHERE, ApiOptions
from dynamo.http.routes.responses_socket import ResponsesSocket, TurnAccounts
from dynamo.http.routes.table import (
    ENGINE_REFUSALS,
    Operation,
    RouteContext,
    RouteTable,
    as_json,
    owner_of,
    owner_of_account,
    refuse,
)
from dynamo.protocols.engine import CompletionUsage
from dynamo.protocols.openai import ChatCompletionRequest
from dynamo.protocols.response_items import InputItem, MessageItem, StoredItem, decode_items
from dynamo.protocols.response_requests import (
    CompactRequest,
    ResponseRequest,
    ResponsesPromptFields,
    TokenCountRequest,
    decode_compact_request,
    decode_response_request,
    decode_token_count,
    with_items,
)
from dynamo.protocols.responses import Compaction, ItemPage, Response, ResponseDeleted, TokenCount
from dynamo.protocols.strict import INVALID, MALFORMED
from dynamo.serving.answers import BodyLater
from dynamo.serving.bodies import decoded
from dynamo.serving.endpoints import Surface
from dynamo.serving.errors import ErrorAnswer, answer_to
from dynamo.serving.models import Models
from dynamo.serving.pipeline import Pipeline
from dynamo.serving.postprocessor import FinishedChoice
from dynamo.serving.prompt_count import count_prompt, counted_model
from dynamo.serving.response_stream import RequestAccount, ResponseStream

KEPT_HERE_BYTES = 256 << 10
"""Responses to requests of longer bodies are encoded for the store in a thread."""

P = TypeVar("P", bound=ResponsesPromptFields)


def add(routes: RouteTable, context: RouteContext) -> None:
    """Add the routes."""
    dropped = Dropped(context.registry, context.metrics_prefix)
    archive = ResponseArchive(open_store(context.apis, dropped), context.registry, context.metrics_prefix)
    routes.on_stop.append(archive.close)
    pages = ResponsePages(
        context.pipeline,
        context.models,
        archive,
        setting("DYN_IGNORE_OPENAI_FE_UNSUPPORTED_FIELDS", False, read_bool),
    )
    routes.hot(
        "POST",
        "/v1/responses",
        pages.handle_response,
        Operation("Create a response", ResponseRequest, Response, streams=True, refusals=ENGINE_REFUSALS),
        variable="DYN_HTTP_SVC_RESPONSES_PATH",
        error_body=error_body,
    )
    socket = ResponsesSocket(context.pipeline, pages.handle_turn, TurnAccounts(context))
    routes.socket(
        "/v1/responses",
        socket.connect,
        Operation(
            "Create responses over a WebSocket",
            answer={"type": "string", "description": "101: `response.create` messages, answered with stream events"},
            refusals=(400, 503),
        ),
        variable="DYN_HTTP_SVC_RESPONSES_PATH",
    )
    routes.hot(
        "POST",
        "/v1/responses/compact",
        pages.handle_compact,
        Operation("Compact a conversation", CompactRequest, Compaction, refusals=ENGINE_REFUSALS),
        error_body=error_body,
    )
    routes.hot(
        "POST",
        "/v1/responses/input_tokens",
        pages.handle_count,
        Operation("Count the tokens of a response's input", TokenCountRequest, TokenCount, refusals=ENGINE_REFUSALS),
        error_body=error_body,
    )
    add_stored(routes, pages)


def add_stored(routes: RouteTable, pages: "ResponsePages") -> None:
    """Add the routes of stored responses."""
    one = "/v1/responses/{id}"
    routes.plain("GET", one, pages.get, Operation("Get a stored response", answer=Response, refusals=(400, 404)))
    routes.plain(
        "DELETE", one, pages.delete, Operation("Delete a stored response", answer=ResponseDeleted, refusals=(404,))
    )
    query: dict[str, dict[str, Any]] = {
        "limit": {"type": "integer", "minimum": 1, "maximum": 100},
        "order": {"enum": ["asc", "desc"]},
        "after": {"type": "string"},
    }
    operation = Operation("List the input items of a response", answer=ItemPage, refusals=(400, 404), query=query)
    routes.plain("GET", "/v1/responses/{id}/input_items", pages.items, operation)


def open_store(options: ApiOptions, dropped: Dropped) -> ResponseStore | None:
    """Return the store of responses. Raise `ConfigError`."""
    if options.responses_store == NOWHERE:
        return None
    if options.responses_store == MEMORY:
        return MemoryResponseStore(options.responses_limits, dropped)
    from dynamo.api.responses.directory_store import DirectoryStore

    return DirectoryStore(options.responses_store, options.responses_limits, dropped)


def error_body(error: ErrorAnswer) -> bytes:
    """Return an error in OpenAI's form; a field of the chat gets the name that it has in the request."""
    if error.param is None:
        return error.body()
    first, rest = error.param, ""
    for place, mark in enumerate(error.param):
        if mark in ".[":
            first, rest = error.param[:place], error.param[place:]
            break
    name = PARAMETERS.get(first)
    return error.body() if name is None else replace(error, param=name if first == "messages" else name + rest).body()


def error_body_of_format(error: ErrorAnswer) -> bytes:
    """Return an error as `error_body` does, for a request with `response_format`, the field of a chat."""
    is_format = error.param is not None and error.param.partition(".")[0] == "response_format"
    return error.body() if is_format else error_body(error)


class ResponsePages(Struct, frozen=True):
    """Handlers of the Responses API."""

    pipeline: Pipeline
    models: Models
    archive: ResponseArchive
    ignores_unknown: bool

    def handle_response(self, exchange: ResponseStream) -> None:
        """POST /v1/responses."""
        self.pipeline.start(exchange, UNREAD, self._respond(exchange))

    def handle_count(self, exchange: ResponseStream) -> None:
        """POST /v1/responses/input_tokens."""
        self.pipeline.start(exchange, UNREAD, self._count(exchange))

    def handle_turn(self, exchange: ResponseStream, session: ResponseSession) -> None:
        """Answer one request of a WebSocket."""
        self.pipeline.start(exchange, UNREAD, self._respond(exchange, session))

    def handle_compact(self, exchange: ResponseStream) -> None:
        """POST /v1/responses/compact."""
        self.pipeline.start(exchange, UNREAD, self._compact(exchange))

    async def _respond(self, exchange: ResponseStream, session: ResponseSession | None = None) -> None:
        decode = partial(decode_response_request, ignore_unknown=self.ignores_unknown)
        request, given = await decoded(exchange.body, partial(with_items, decode), "responses")
        exchange.error_body = error_body if request.response_format is None else error_body_of_format
        if session is not None:
            request.stream = True
        account = exchange.account
        input_items, before = await self._items(request, given, account, session)
        items = [*before, *input_items]
        chat = await self._chat(request, items, account, request.max_output_tokens or 1)
        is_stored = self.archive.is_open and request.store is not False
        body_bytes = len(exchange.body)
        is_long = is_long_echo(request, body_bytes)
        echo = await in_few_threads(partial(echo_of, request), "body writing", 1) if is_long else None
        keep = partial(
            self._keep,
            input_items if is_stored else None,
            items,
            session,
            owner_of_account(account),
            is_long=body_bytes > KEPT_HERE_BYTES,
        )
        writer = partial(writer_of, request, keep, is_stored, echo=echo)
        surface = replace(UNREAD, chunks=writer, body=partial(whole_body, writer, is_long=is_long))
        await self.pipeline.serve(exchange, chat, surface)

    async def _count(self, exchange: ResponseStream) -> None:
        decode = partial(decode_token_count, ignore_unknown=self.ignores_unknown)
        request, given = await decoded(exchange.body, partial(with_items, decode), "input_tokens")
        exchange.error_body = error_body
        account = exchange.account
        request.model = request.model or self._only_model(account)
        input_items, before = await self._items(request, given, account)
        chat = await self._chat(request, [*before, *input_items], account, 1)
        preprocessor = counted_model(self.models, chat.model, account).preprocessor
        exchange.respond(200, json_encode(TokenCount(await count_prompt(preprocessor, chat, len(exchange.body)))))

    async def _compact(self, exchange: ResponseStream) -> None:
        decode = partial(decode_compact_request, ignore_unknown=self.ignores_unknown)
        request, given = await decoded(exchange.body, partial(with_optional_items, decode), "compact")
        exchange.error_body = error_body
        account = exchange.account
        if request.input is None and request.previous_response_id is None:
            raise InvalidArgument(f"{MALFORMED}missing field `input`", param="input")
        owner = owner_of_account(account)
        input_items = await self.archive.resolve(given, owner)
        before = await self._before(request.previous_response_id, input_items, owner)
        items = [*before, *input_items]
        context_length = counted_model(self.models, request.model, account).preprocessor.context_length
        tokens_max = min(SUMMARY_TOKENS_MAX, context_length // 4) if context_length else SUMMARY_TOKENS_MAX
        summary = ResponseRequest(
            model=request.model,
            instructions=request.instructions,
            prompt_cache_key=request.prompt_cache_key,
            max_output_tokens=max(tokens_max, 1),
            truncation="auto",
        )
        chat = await self._chat(summary, [*items, MessageItem("user", SUMMARY_REQUEST)], account, max(tokens_max, 1))
        writer = partial(writer_of, summary, None, False)
        await self.pipeline.serve(exchange, chat, replace(UNREAD, body=partial(compaction_of, writer, items)))

    async def _items(
        self,
        request: ResponsesPromptFields,
        given: list[InputItem],
        account: RequestAccount | None,
        session: ResponseSession | None = None,
    ) -> tuple[list[StoredItem], list[StoredItem]]:
        """Return the request's items and the conversation before them. Raise `InvalidArgument` and `NotFound`."""
        owner = owner_of_account(account)
        input_items = await self.archive.resolve(given, owner)
        return input_items, await self._before(request.previous_response_id, input_items, owner, session)

    async def _before(
        self,
        previous: str | None,
        input_items: Sequence[StoredItem],
        owner: str | None,
        session: ResponseSession | None = None,
    ) -> list[StoredItem]:
        """Return the conversation before the request's items, from stored responses of `owner`.

        Raise `NotFound`, and `InvalidArgument` for a tool result without a call.
        """
        if previous is None:
            return []
        before = None if session is None else session.history(previous)
        if before is None:
            if session is not None and not self.archive.is_open:
                raise previous_not_found(previous)
            before = await self.archive.history(previous, owner)
        check_results(before, input_items)
        return before

    async def _chat(
        self,
        request: ResponsesPromptFields,
        items: list[StoredItem],
        account: RequestAccount | None,
        answer_tokens: int,
    ) -> ChatCompletionRequest:
        return await fitting_chat(
            request, items, answer_tokens, lambda name: counted_model(self.models, name, account).preprocessor
        )

    def _only_model(self, account: RequestAccount | None) -> str | None:
        """Return the name of the model if the caller may use exactly one, else None."""
        names = [name for name in self.models.served() if account is None or account.may_use(name)]
        return names[0] if len(names) == 1 else None

    def _keep(
        self,
        input_items: Sequence[StoredItem] | None,
        items: Sequence[StoredItem],
        session: ResponseSession | None,
        owner: str | None,
        response: Response,
        *,
        is_long: bool,
    ) -> None:
        """Store a response with its input items, unless `input_items` is None, and keep it for its connection."""
        if input_items is not None:
            self.archive.keep(response, input_items, owner, is_long=is_long)
        if session is not None:
            session.remember(response, items)

    # Stored responses.

    async def get(self, request: Request) -> HttpResponse:
        """GET /v1/responses/{id}."""
        try:
            if request.query_params.get("stream", "false") not in ("false", "0"):
                raise InvalidArgument(
                    f"{INVALID}`stream` is not supported for stored responses: they are stored whole", param="stream"
                )
            return as_json((await self.archive.find(request.path_params["id"], owner_of(request))).response)
        except DynamoException as error:
            return refuse(answer_to(error))

    async def delete(self, request: Request) -> HttpResponse:
        """DELETE /v1/responses/{id}."""
        response_id = request.path_params["id"]
        try:
            await self.archive.delete(response_id, owner_of(request))
        except DynamoException as error:
            return refuse(answer_to(error))
        return as_json(ResponseDeleted(response_id))

    async def items(self, request: Request) -> HttpResponse:
        """GET /v1/responses/{id}/input_items."""
        query = request.query_params
        try:
            limit = query.get("limit", str(PAGE))
            if not limit.isascii() or not limit.isdigit():
                raise InvalidArgument(f"{INVALID}`limit` must be a number", param="limit")
            record = await self.archive.find(request.path_params["id"], owner_of(request))
            page = page_of(
                record.input, limit=int(limit[:9]), order=query.get("order", "desc"), after=query.get("after")
            )
        except DynamoException as error:
            return refuse(answer_to(error))
        return as_json(page)


def with_optional_items(
    decode: Callable[[bytes], CompactRequest], body: bytes
) -> tuple[CompactRequest, list[InputItem]]:
    """Return a request and its items, if it has any. Raise `InvalidArgument`."""
    request = decode(body)
    return request, [] if request.input is None else decode_items(request.input)


def writer_of(
    request: ResponseRequest,
    keep: Keep | None,
    is_stored: bool,
    response_id: str,
    model: str,
    created: int,
    echo: RequestEcho | None = None,
) -> ResponseWriter:
    """Return the writer of a streamed response."""
    response = to_response(request, response_id, created, is_stored=is_stored)
    return ResponseWriter(response, now=time.time, keep=keep, logprobs=wants_logprobs(request), echo=echo)


def compaction_of(
    writer: "partial[ResponseWriter]",
    items: Sequence[StoredItem],
    response_id: str,
    model: str,
    created: int,
    choices: Sequence[FinishedChoice],
    usage: CompletionUsage,
) -> BodyLater:
    """Return the function that writes the compacted conversation, whose summary the model has written.

    It contains most of the conversation, which may be long.
    """
    response = writer(response_id, model, created).whole(choices[0], usage)
    return lambda: json_encode(compacted(items, response))


UNREAD = Surface(
    endpoint="responses",
    model_type="Chat",
    response_id=lambda _: new_response_id(),
    chunks=undecoded,
    body=undecoded,
    error_body=ErrorAnswer.body,  # Until the request is decoded, errors name its own fields.
    always_usage=True,
)
"""Surface of responses until their request is decoded."""
