"""Attacks of `floods` on endpoints other than chats and completions."""

import json
from collections.abc import Iterator

from benchmarks.floods.attacks import MEGA, USER, Attack, batch, chat, listed, many_messages, stops, text
from benchmarks.floods.send import Shot, request_bytes, send
from benchmarks.stacks import MODEL_NAME

EMBEDDINGS, RESPONSES, MESSAGES = "/v1/embeddings", "/v1/responses", "/v1/messages"
IMAGES, EDITS, SPEECH = "/v1/images/generations", "/v1/images/edits", "/v1/audio/speech"
FILES, BATCHES = "/v1/files", "/v1/batches"
READ = ("/openapi.json", "/metrics", "/health", "/v1/models", "/docs", "/busy_threshold", "/console/api/overview")
READ_AFTER = ("/routing/state", "/routing/decisions", "/routing/sessions", "/console/api/requests", "/metrics?after")
"""Pages about what the requests before have left behind."""
BOUNDARY = "x0123456789"
FORM = f"multipart/form-data; boundary={BOUNDARY}"


def endpoint_attacks() -> Iterator[Attack]:
    """Yield the attacks on one endpoint after the other, the writers not yet called."""
    for path in READ:
        yield Attack(f"GET {path}", path, method="GET")
    yield Attack("a path of 60 KB", "/v1/models/" + "a/ready/" * 7600, method="GET")
    yield Attack("a query of 60 KB", "/v1/models?" + "a=%41&" * 10_000, method="GET")
    yield from _embeddings()
    yield from _responses()
    yield from _messages()
    yield from _media()
    yield from _files()
    for path in READ_AFTER:
        yield Attack(f"GET {path}, after all others", path, method="GET")


def _embeddings() -> Iterator[Attack]:
    yield Attack("2,000 embeddings", EMBEDDINGS, lambda: input_body(stops(2000, 400)))
    yield Attack("an embedding of 15 MB", EMBEDDINGS, lambda: input_body(f'"{text(15 * MEGA)}"'))
    yield Attack("128 embeddings of 8,000 ids", EMBEDDINGS, lambda: input_body(batch(128, 8000)))
    for path in ("/v1/classify", "/v1/pooling"):
        yield Attack(f"1,000,000 texts to {path}", path, lambda: input_body(stops(MEGA, 10)))
    yield Attack("1,000,000 documents to rank", "/v1/rerank", lambda: _ranking(MEGA, 10))
    yield Attack("100 MB of documents to rank", "/v1/rerank", lambda: _ranking(100, MEGA))


def _responses() -> Iterator[Attack]:
    count, compact = f"{RESPONSES}/input_tokens", f"{RESPONSES}/compact"
    yield Attack("a response of 15 MB", RESPONSES, lambda: input_body(_words()))
    yield Attack("10,000 response items", RESPONSES, lambda: input_body(_items(10_000)))
    yield Attack(
        "response instructions of 15 MB, streamed",
        RESPONSES,
        lambda: input_body(f'"hi","stream":true,"instructions":{_words()}'),
    )
    yield Attack(
        "14 MB of response tools, streamed",
        RESPONSES,
        lambda: input_body(f'"hi","stream":true,"tools":{_response_tools(14)}'),
    )
    yield Attack("1,000,000 response metadata", RESPONSES, lambda: input_body(f'"hi","metadata":{_metadata(MEGA)}'))
    yield Attack("a count of 15 MB", count, lambda: input_body(_words()))
    yield Attack("a count of 10,000 items", count, lambda: input_body(_items(10_000)))
    yield Attack("a compaction of 15 MB", compact, lambda: input_body(_words()))
    yield StoredResponse("a stored response of 15 MB, read", RESPONSES, lambda: input_body(_words()))
    yield StoredResponse("10,000 stored items, read", RESPONSES, lambda: input_body(_items(10_000)))


def _messages() -> Iterator[Attack]:
    for name, path in (("", MESSAGES), (", counted", f"{MESSAGES}/count_tokens")):
        many = many_messages(10_000) + "," + USER
        yield Attack(f"10,000 Anthropic messages{name}", path, lambda m=many: chat(messages=m))
        words = "an Anthropic message of 15 MB"
        yield Attack(f"{words}{name}", path, lambda: chat(messages=f'{{"role":"user","content":{_words()}}}'))
        yield Attack(f"100,000 Anthropic system blocks{name}", path, lambda: chat(f'"system":{_blocks(100_000)}'))
        yield Attack(f"100 Anthropic tools of 1 MB{name}", path, lambda: chat(f'"tools":{_anthropic_tools(100, MEGA)}'))
        yield Attack(f"an Anthropic image of 100 MB{name}", path, lambda: chat(messages=_anthropic_image(100 * MEGA)))


def _media() -> Iterator[Attack]:
    yield Attack("an image's prompt of 15 MB", IMAGES, lambda: _image(text(15 * MEGA)))
    yield Attack("an image's prompt of 180 MB", IMAGES, lambda: _image("a" * (180 * MEGA)))
    yield Attack(
        "an image's reference of 100 MB", EDITS, lambda: _image("a", f'"input_reference":"{DATA}{"A" * (100 * MEGA)}"')
    )
    yield Attack(
        "20,000,000 lists for an image", IMAGES, lambda: _image("a", f'"a":{listed(iter(["[]"] * 20 * MEGA))}')
    )
    yield Attack(
        "10,000,000 numbers for an image", IMAGES, lambda: _image("a", f'"a":{listed(iter(["1"] * 10 * MEGA))}')
    )
    yield Attack("1,000,000 fields of an image", IMAGES, lambda: _image("a", _fields(MEGA)))
    yield Attack("lists 900 deep for an image", IMAGES, lambda: _image("a", f'"a":{"[" * 900}{"]" * 900}'))
    yield Attack("a speech of 15 MB", SPEECH, _speech)
    yield FormAttack("a form with a picture of 100 MB", EDITS, lambda: form_body([("image", b"A" * (100 * MEGA))]))
    yield FormAttack("a form of 100,000 fields", EDITS, lambda: form_body([("a", b"b")] * 100_000))
    yield FormAttack("a form of nearly boundaries", EDITS, lambda: form_body([("image", _nearly())]))
    yield FormAttack("a form's header of 10 MB", EDITS, lambda: form_body([("a" * (10 * MEGA), b"")]))


def _files() -> Iterator[Attack]:
    purpose = ("purpose", b"batch")
    yield FormAttack("a file of 100 MB", FILES, lambda: form_body([purpose, ("file", b"A" * (100 * MEGA))]))
    yield FormAttack("a file of nearly boundaries", FILES, lambda: form_body([purpose, ("file", _nearly())]))
    yield FormAttack("a file with 100,000 fields", FILES, lambda: form_body([purpose] * 100_000))
    yield Attack("GET /v1/files", FILES, method="GET")
    yield StoredBatch("a batch of 50,000 refused lines", FILES, _refused_lines)
    yield StoredBatch(
        "a batch with a line of 100 MB", FILES, lambda: b'{"custom_id":"a","body":"' + b"a" * (100 * MEGA)
    )
    yield StoredBatch("a batch with a line of 5,000,000 lists", FILES, _line_of_lists)
    yield Attack("a batch's metadata of 1 MB", BATCHES, lambda: b'{"metadata":%b}' % _metadata(50_000).encode())


class FormAttack(Attack):
    """A request whose body is a form."""

    def prepare(self) -> Shot:
        """Return a function that sends the form once."""
        request = request_bytes(self.method, self.path, self.body(), FORM)
        return lambda port: send(port, request)


class StoredResponse(Attack):
    """A response that is stored once and then read."""

    def prepare(self) -> Shot:
        """Return a function that reads the response and its items; the first call stores it."""
        body, paths = self.body(), list[str]()

        def shot(port: int) -> tuple[int, str]:
            if not paths:
                status, answer = send(port, request_bytes("POST", self.path, body))
                if status != 200:
                    return status, answer
                found = answer.partition('"id":"')[2].partition('"')[0]
                paths.extend([f"{self.path}/{found}", f"{self.path}/{found}/input_items?limit=100"])
            return [send(port, request_bytes("GET", path, b"")) for path in paths][-1]

        return shot


class StoredBatch(Attack):
    """A file that is uploaded once, and a batch of it."""

    def prepare(self) -> Shot:
        """Return a function that creates a batch; the first call uploads the file."""
        upload, files = form_body([("purpose", b"batch"), ("file", self.body())]), list[str]()

        def shot(port: int) -> tuple[int, str]:
            if not files:
                status, answer = send(port, request_bytes("POST", self.path, upload, FORM))
                if status != 200:
                    return status, answer
                files.append(str(json.loads(answer)["id"]))
            wanted = f'{{"input_file_id":"{files[0]}","endpoint":"/v1/chat/completions","completion_window":"24h"}}'
            return send(port, request_bytes("POST", BATCHES, wanted.encode()))

        return shot


DATA = "data:image/png;base64,"
TEXT_BLOCK = '{"type":"text","text":"a"}'


def input_body(value: str) -> bytes:
    """Return a body whose field `input` begins with the value; further fields may follow in it."""
    return f'{{"model":"{MODEL_NAME}","input":{value}}}'.encode()


def form_body(fields: list[tuple[str, bytes]]) -> bytes:
    """Return a form; fields other than `purpose` and `a` are files."""
    parts = []
    for name, data in fields:
        file = "" if name in ("purpose", "a") else '; filename="a"'
        head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{file}\r\n\r\n'
        parts.append(head.encode() + data + b"\r\n")
    return b"".join([*parts, f"--{BOUNDARY}--\r\n".encode()])


def _nearly() -> bytes:
    """Return 50 MB that look like boundaries until their last character."""
    return f"\r\n--{BOUNDARY[:-1]}".encode() * (50 * MEGA // (len(BOUNDARY) + 3))


def _items(count: int) -> str:
    return listed(iter(['{"type":"message","role":"user","content":[{"type":"input_text","text":"hi"}]}'] * count))


def _response_tools(count: int) -> str:
    one = f'"type":"function","description":"{text(MEGA - 1)}","parameters":{{"type":"object"}}'
    return listed(f'{{"name":"tool_{number}",{one}}}' for number in range(count))


def _words() -> str:
    return f'"{text(15 * MEGA)}"'


def _metadata(count: int) -> str:
    return "{" + ",".join(f'"key_{number}":"a"' for number in range(count)) + "}"


def _fields(count: int) -> str:
    return ",".join(f'"field_{number}":1' for number in range(count))


def _anthropic_tools(count: int, chars: int) -> str:
    one = f'"description":"{text(chars - 1)}","input_schema":{{"type":"object"}}'
    return listed(f'{{"name":"tool_{number}",{one}}}' for number in range(count))


def _anthropic_image(chars: int) -> str:
    source = f'{{"type":"base64","media_type":"image/png","data":"{"A" * chars}"}}'
    return f'{{"role":"user","content":[{{"type":"image","source":{source}}},{TEXT_BLOCK}]}}'


def _blocks(count: int) -> str:
    return listed(iter([TEXT_BLOCK] * count))


def _image(prompt: str, more: str = "") -> bytes:
    rest = f",{more}" if more else ""
    return f'{{"model":"{MODEL_NAME}","prompt":"{prompt}"{rest}}}'.encode()


def _ranking(count: int, chars: int) -> bytes:
    return f'{{"model":"{MODEL_NAME}","query":"a","documents":{stops(count, chars)}}}'.encode()


def _speech() -> bytes:
    return f'{{"model":"{MODEL_NAME}","voice":"a","input":{_words()}}}'.encode()


def _refused_lines() -> bytes:
    line = b'{"custom_id":"%d","method":"POST","url":"/v1/chat/completions","body":{}}\n'
    return b"".join(line % number for number in range(50_000))


def _line_of_lists() -> bytes:
    head = b'{"custom_id":"a","method":"POST","url":"/v1/chat/completions","body":{"a":['
    return head + b"[]," * (5 * MEGA) + b"[]]}}"
