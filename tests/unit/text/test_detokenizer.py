"""The detokenizer returns the library's text in pieces, each only when it is final."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo.text.detokenizer import Detokenizer, TokenTable, json_text, text_json_of
from dynamo.text.tokenizer.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.from_dir(str(model_dir))


@pytest.fixture(scope="module")
def piece_tokenizer(sentencepiece_dir: Path) -> Tokenizer:
    return Tokenizer.from_dir(str(sentencepiece_dir))


def table_of(*tokens: bytes) -> TokenTable:
    return TokenTable(tokens, text_json_of(tokens))


def text_of(detokenizer: Detokenizer, ids: list[int]) -> str:
    return "".join([*map(detokenizer.push, ids), detokenizer.flush()])


IDS = st.lists(st.integers(0, 550), max_size=60)


@settings(max_examples=200, deadline=None)
@given(ids=IDS, skip=st.booleans())
def test_detokenizer_equals_the_library_for_random_ids(tokenizer: Tokenizer, ids: list[int], skip: bool) -> None:
    assert text_of(Detokenizer(tokenizer.table(skip)), ids) == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=200, deadline=None)
@given(ids=IDS, skip=st.booleans())
def test_detokenizer_and_token_table_produce_the_same_json(tokenizer: Tokenizer, ids: list[int], skip: bool) -> None:
    table = tokenizer.table(skip)
    detokenizer = Detokenizer(table)
    body = b""
    for token_id in ids:
        piece = None if detokenizer.is_pending else table.text_json[token_id]
        body += json_text(detokenizer.push(token_id)) if piece is None else piece
    body += json_text(detokenizer.flush())
    assert msgspec.json.decode(b'"' + body + b'"') == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_detokenizer_round_trips_any_text_through_sentencepiece(piece_tokenizer: Tokenizer, text: str) -> None:
    ids = piece_tokenizer.encode(text)
    continued = text_of(Detokenizer(piece_tokenizer.table()), ids)
    assert continued.removeprefix(" ") == piece_tokenizer.decode(ids)


def byte_runs() -> st.SearchStrategy[list[bytes]]:
    """Runs of byte tokens, each wholly text or wholly broken: there the library and the stream can agree."""
    whole = st.text(st.sampled_from("é日😀a"), max_size=3).map(str.encode)
    broken = st.lists(st.sampled_from([b"\x80", b"\xff", b"\xe6"]), max_size=3).map(b"".join)
    return st.lists(st.one_of(whole, broken), max_size=8)


@settings(max_examples=100, deadline=None)
@given(runs=byte_runs())
def test_detokenizer_equals_the_library_for_runs_of_byte_tokens(piece_tokenizer: Tokenizer, runs: list[bytes]) -> None:
    comma = piece_tokenizer.encode(",")[-1]
    ids = [comma]
    for run in runs:
        ids += [piece_tokenizer.token_to_id(f"<0x{byte:02X}>") or 0 for byte in run]
        ids.append(comma)
    text = text_of(Detokenizer(piece_tokenizer.table()), ids)
    assert text == piece_tokenizer.decode(ids)


def test_detokenizer_returns_a_split_character_when_complete() -> None:
    detokenizer = Detokenizer(table_of(b"a\xe6", b"\x97", b"\xa5", b"b"))
    assert [detokenizer.push(token_id) for token_id in (0, 1, 2, 3)] == ["a", "", "日", "b"]


def test_detokenizer_is_pending_until_the_character_is_complete() -> None:
    detokenizer = Detokenizer(table_of(b"\xc3", b"\xa9"))
    states = [detokenizer.is_pending]
    for token_id in (0, 1):
        detokenizer.push(token_id)
        states.append(detokenizer.is_pending)
    assert states == [False, True, False]


def test_detokenizer_replaces_an_incomplete_character_at_the_end() -> None:
    detokenizer = Detokenizer(table_of(b"\xe6\x97"))
    assert (detokenizer.push(0), detokenizer.flush(), detokenizer.flush()) == ("", "\ufffd", "")


def test_token_table_has_no_text_for_a_partial_character() -> None:
    assert table_of(b"ok", b"\xe6", b'"\n\\', "é".encode()).text_json == [b"ok", None, b'\\"\\n\\\\', "é".encode()]


def test_token_table_has_one_object_for_bytes_and_json_that_are_equal() -> None:
    raw = [b" word", b'"', "é".encode()]
    found = text_json_of(raw)
    assert found == [b" word", b'\\"', "é".encode()]
    assert found[0] is raw[0]
    assert found[2] is raw[2]


def test_token_table_has_empty_text_for_a_skipped_special_token(tokenizer: Tokenizer) -> None:
    token_id = tokenizer.token_to_id("<|im_end|>")
    assert token_id is not None
    assert tokenizer.table(skip_special_tokens=True).text_json[token_id] == b""
    assert tokenizer.table(skip_special_tokens=False).text_json[token_id] == b"<|im_end|>"


def test_token_table_has_no_text_for_an_id_outside_the_vocabulary(tokenizer: Tokenizer) -> None:
    assert Detokenizer(tokenizer.table()).push(tokenizer.vocab_size) == ""


# ---- stop strings -------------------------------------------------------------------------------------------------

LETTERS = table_of(b"a", b"b", b"ab", b"aab", b"ba", b"\xc3", b"\xa9", b"bb")
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3)


def stopped(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Return the text up to the stop string that is complete first; of two at once the longer."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text.endswith(stop, 0, end)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 7), max_size=30), stops=STOPS, include=st.booleans())
def test_stop_string_is_found_across_token_boundaries(ids: list[int], stops: list[str], include: bool) -> None:
    whole = text_of(Detokenizer(LETTERS), ids)
    detokenizer = Detokenizer(LETTERS, stops, include_stop=include)
    assert (text_of(detokenizer, ids), detokenizer.stopped_by) == stopped(whole, stops, include)


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 7), max_size=30), stops=STOPS)
def test_stop_string_search_holds_back_only_possible_prefixes(ids: list[int], stops: list[str]) -> None:
    detokenizer = Detokenizer(LETTERS, stops)
    plain = Detokenizer(LETTERS)
    given_out = seen = ""
    for token_id in ids:
        given_out += detokenizer.push(token_id)
        seen += plain.push(token_id)
        if detokenizer.stopped_by is not None:
            break
        held = seen[len(given_out) :]
        assert seen.startswith(given_out)
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_stop_string_ends_the_text() -> None:
    detokenizer = Detokenizer(LETTERS, ["ab"])
    assert [detokenizer.push(token_id) for token_id in (1, 0, 1, 1)] == ["b", "", "", ""]
    assert (detokenizer.flush(), detokenizer.stopped_by, detokenizer.is_pending) == ("", "ab", False)


def test_stop_string_search_releases_held_text_at_the_end() -> None:
    detokenizer = Detokenizer(LETTERS, ["abb"])
    assert (detokenizer.push(2), detokenizer.is_pending, detokenizer.flush()) == ("", True, "ab")


def test_stop_string_may_contain_the_replacement_character() -> None:
    detokenizer = Detokenizer(LETTERS, ["a\ufffd"])
    assert detokenizer.push(0) + detokenizer.push(5) + detokenizer.flush() == ""
    assert detokenizer.stopped_by == "a\ufffd"


def test_stop_string_of_many_repetitions_is_searched_in_linear_time() -> None:
    detokenizer = Detokenizer(table_of(b"a" * 1000), ["a" * 100_000 + "b"])
    stop = detokenizer._stops[0]
    for _ in range(300):
        detokenizer.push(0)
    assert stop.matched == 100_000
    assert len(detokenizer._held) == 100_000
