"""Prompts of sessions: earlier turns are kept within limits."""

from hypothesis import given
from hypothesis import strategies as st

from dynamo.kv_router.session_prefixes import BRANCHES_MAX, SessionPrefixes


def blocks(text: str) -> bytes:
    return b"".join(letter.encode() * 8 for letter in text)


def test_session_prefixes_replace_a_prompt_by_its_continuation() -> None:
    known = SessionPrefixes()
    known.note("s", blocks("ab"))
    known.note("s", blocks("abc"))

    assert known.of("s") == [blocks("abc")] and known.blocks == 3


def test_session_prefixes_keep_separate_branches() -> None:
    known = SessionPrefixes()
    known.note("s", blocks("abc"))
    known.note("s", blocks("abd"))

    assert known.of("s") == [blocks("abd"), blocks("abc")]


def test_session_prefixes_refresh_on_a_shorter_prompt() -> None:
    known = SessionPrefixes()
    known.note("s", blocks("abc"))
    known.note("s", blocks("x"))
    known.note("s", blocks("ab"))

    assert known.of("s") == [blocks("abc"), blocks("x")]


def test_session_prefixes_forget_an_ended_session() -> None:
    known = SessionPrefixes()
    known.note("s", blocks("abc"))
    known.end("s")
    known.end("never")

    assert known.of("s") == [] and known.blocks == 0 and len(known) == 0


def test_session_prefixes_evict_the_least_recently_used_session() -> None:
    known = SessionPrefixes(sessions_max=2)
    for name in ("a", "b", "a", "c"):
        known.note(name, blocks("x"))

    assert known.names() == ["c", "a"]


def test_session_prefixes_bound_blocks() -> None:
    known = SessionPrefixes(bytes_max=8 * 4)
    known.note("a", blocks("abc"))
    known.note("b", blocks("def"))
    assert known.names() == ["b"]

    known.note("b", blocks("defghijkl"))
    assert known.names() == ["b"]


def test_session_prefixes_bound_branches() -> None:
    known = SessionPrefixes()
    for number in range(BRANCHES_MAX + 3):
        known.note("s", number.to_bytes(8))

    assert len(known.of("s")) == BRANCHES_MAX


@given(st.lists(st.tuples(st.sampled_from("pqr"), st.text("ab", max_size=4), st.booleans()), max_size=40))
def test_session_prefixes_keep_every_prompt_as_a_prefix_of_a_known_one(
    steps: list[tuple[str, str, bool]],
) -> None:
    known = SessionPrefixes(sessions_max=3)
    reported: dict[str, list[bytes]] = {}
    for session, text, ends in steps:
        if ends:
            known.end(session)
            reported.pop(session, None)
        else:
            known.note(session, blocks(text))
            reported.setdefault(session, []).append(blocks(text))
        known.validate()
        for name, prompts in reported.items():
            assert all(any(one.startswith(prompt) for one in known.of(name)) for prompt in prompts)
