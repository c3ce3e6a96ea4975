"""Script: the response of the scripted engine, which an annotation of the request contains."""

import msgspec

MARK = "script:"


class Script(msgspec.Struct, omit_defaults=True):
    """Text of each choice, and how it is sent."""

    texts: list[str]
    cuts: list[int] = []
    """Characters of each piece that is tokenized separately, repeated cyclically; none: the text as a whole."""
    sizes: list[int] = msgspec.field(default_factory=lambda: [1])
    """Tokens of each message, repeated cyclically."""
    ids: list[list[int]] = []
    """Token ids instead of the texts."""
    finish_reason: str = "stop"
    stop_reason: int | str | None = None
    cached: int | None = None
    """Prompt tokens reported as cached."""
    counts: bool = True
    """Whether the last message contains token counts."""
    scores: list[float] = []
    """Cumulative log-probability of each choice."""
    fails_after: int | None = None
    """Number of tokens of the first choice before the error."""
    fails_as: str = "InvalidArgument"
    """Name of the error's class."""
    fails_when: str = ""
    """Path of a file that the client creates once it has read a part of the response: the error follows then. A frontend that reads
    tokens and error at once writes the error alone."""
    engine_data: dict[str, object] | None = None

    def annotation(self) -> str:
        """Return the script as a value of `nvext.annotations`."""
        return MARK + msgspec.json.encode(self).decode()


def script_of(annotations: list[str]) -> Script:
    """Return the script among a request's annotations, or a short greeting."""
    for note in annotations:
        if note.startswith(MARK):
            return msgspec.json.decode(note.removeprefix(MARK), type=Script)
    return Script(["Hello there."])


def pieces(text: str, sizes: list[int]) -> list[str]:
    """Cut the text into pieces of those sizes, repeated cyclically."""
    if not sizes:
        return [text]
    found: list[str] = []
    place = turn = 0
    while place < len(text):
        size = max(1, sizes[turn % len(sizes)])
        found.append(text[place : place + size])
        place, turn = place + size, turn + 1
    return found
