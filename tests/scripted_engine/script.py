"""Script: the text of the scripted engine, carried by an annotation of the request."""

import msgspec

MARK = "script:"


class Script(msgspec.Struct, omit_defaults=True):
    """One text for each choice, and how it is sent."""

    texts: list[str]
    cuts: list[int] = []
    """Characters of each piece that is tokenized on its own, again and again; none: the text as a whole."""
    sizes: list[int] = msgspec.field(default_factory=lambda: [1])
    """Tokens in each message, again and again."""
    ids: list[list[int]] = []
    """Token ids in place of the texts."""
    finish_reason: str = "stop"
    stop_reason: int | str | None = None
    cached: int | None = None
    """Prompt tokens that are reported as cached."""
    counts: bool = True
    """Whether the last message counts the tokens."""
    scores: list[float] = []
    """The cumulative log-probability of each choice."""
    fails_after: int | None = None
    """The error comes after so many tokens of the first choice."""
    fails_as: str = "InvalidArgument"
    """The name of the error's class."""
    fails_later_s: float = 0.0
    """Seconds between the last token and the error: a frontend that reads both at once writes the error alone."""
    engine_data: dict[str, object] | None = None

    def annotation(self) -> str:
        """As it travels in `nvext.annotations`."""
        return MARK + msgspec.json.encode(self).decode()


def script_of(annotations: list[str]) -> Script:
    """The script among a request's annotations; without one it is a short greeting."""
    for note in annotations:
        if note.startswith(MARK):
            return msgspec.json.decode(note.removeprefix(MARK), type=Script)
    return Script(["Hello there."])


def pieces(text: str, sizes: list[int]) -> list[str]:
    """The text, cut again and again into pieces of those sizes."""
    if not sizes:
        return [text]
    found: list[str] = []
    place = turn = 0
    while place < len(text):
        size = max(1, sizes[turn % len(sizes)])
        found.append(text[place : place + size])
        place, turn = place + size, turn + 1
    return found
