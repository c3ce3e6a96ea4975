"""How a worker that stands still is told from one that has nothing to say."""

from hypothesis import given
from hypothesis import strategies as st

from dynamo.runtime.request_plane.tcp.keep_alive import LOOKS, KeepAlive


def test_who_speaks_is_never_asked() -> None:
    keep_alive = KeepAlive()
    assert not any(keep_alive.look(heard) for heard in range(1, 50))
    assert not keep_alive.is_silent(49)


def test_who_says_nothing_is_asked_once_and_then_given_time() -> None:
    keep_alive = KeepAlive()
    keep_alive.look(1)
    asked = [keep_alive.look(1) for _ in range(LOOKS - 1)]
    assert asked == [True] + [False] * (LOOKS - 2)
    assert keep_alive.is_silent(1)


def test_who_answers_at_the_last_moment_lives_and_is_asked_again_later() -> None:
    keep_alive = KeepAlive()
    keep_alive.look(1)
    for _ in range(LOOKS - 2):
        keep_alive.look(1)
    assert not keep_alive.is_silent(1)
    assert not keep_alive.look(2)
    assert keep_alive.look(2), "quiet again: it is asked again"
    assert not keep_alive.is_silent(2)


def test_the_silence_is_over_with_the_first_word_not_with_the_next_look() -> None:
    keep_alive = KeepAlive()
    for _ in range(LOOKS):
        keep_alive.look(0)
    assert keep_alive.is_silent(0)
    assert not keep_alive.is_silent(1)


@given(st.lists(st.booleans(), max_size=100))
def test_silence_is_so_many_looks_in_a_row_without_a_word(looks: list[bool]) -> None:
    keep_alive, heard, quiet = KeepAlive(), 0, 0
    for speaks in looks:
        heard += speaks
        quiet = 0 if speaks else quiet + 1
        assert keep_alive.look(heard) == (quiet == 1)
        assert keep_alive.is_silent(heard) == (quiet >= LOOKS - 1)
