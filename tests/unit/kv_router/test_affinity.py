"""A session stays with its worker while it is used, and no longer."""

from dynamo.kv_router.affinity import Affinity

HERE, THERE = (1, 0), (2, 1)


def test_a_session_keeps_its_rank_until_it_was_idle_for_too_long() -> None:
    affinity = Affinity(10)
    affinity.bind("s", "a", HERE, 0)
    affinity.finish("a", 5)
    assert affinity.find("s", 14) == HERE
    assert affinity.find("s", 15) is None
    assert len(affinity) == 0


def test_a_request_under_way_keeps_it() -> None:
    affinity = Affinity(10)
    affinity.bind("s", "a", HERE, 0)
    affinity.expire(99)
    assert affinity.find("s", 99) == HERE
    affinity.finish("a", 99)
    affinity.finish("a", 99)
    affinity.expire(110)
    assert len(affinity) == 0


def test_a_session_may_be_bound_anew_or_ended() -> None:
    affinity = Affinity(10)
    affinity.bind("s", "a", HERE, 0)
    affinity.bind("s", "b", THERE, 1)
    assert affinity.find("s", 2) == THERE
    affinity.end("s")
    affinity.end("s")
    assert affinity.find("s", 2) is None
    affinity.finish("a", 3)
    affinity.finish("b", 3)


def test_who_is_used_least_goes_when_there_are_too_many() -> None:
    affinity = Affinity(10, sessions_max=2)
    for number, session in enumerate("aba"):
        affinity.bind(session, f"r{number}", HERE, number)
    affinity.bind("c", "r9", HERE, 9)
    assert [affinity.find(session, 9) for session in "abc"] == [HERE, None, HERE]


def test_the_newest_binding_is_in_force_whoever_made_it() -> None:
    affinity = Affinity(10)
    affinity.writer = 5
    affinity.bind("s", "a", HERE, 0)
    assert affinity.version_of("s") == (1, 5)
    assert not affinity.apply("s", THERE, (1, 4), 1)
    assert affinity.find("s", 1) == HERE
    assert affinity.apply("s", THERE, (1, 6), 1)
    assert affinity.find("s", 1) == THERE
    affinity.bind("s", "b", HERE, 2)
    assert affinity.version_of("s") == (2, 5)


def test_a_binding_that_was_heard_ends_like_another() -> None:
    affinity = Affinity(10, sessions_max=1)
    assert affinity.apply("s", HERE, (3, 1), 0)
    assert affinity.apply("s", HERE, (3, 1), 5), "the same one again keeps it"
    assert affinity.find("s", 14) == HERE
    assert affinity.find("s", 15) is None
    affinity.apply("a", HERE, (4, 1), 20)
    affinity.apply("b", HERE, (5, 1), 20)
    assert affinity.find("a", 20) is None
    assert affinity.version_of("a") is None


def test_requests_under_way_keep_a_session_that_another_router_moved() -> None:
    affinity = Affinity(10)
    affinity.bind("s", "a", HERE, 0)
    affinity.apply("s", THERE, (9, 9), 1)
    affinity.expire(99)
    assert affinity.find("s", 99) == THERE
    affinity.finish("a", 99)
    affinity.expire(110)
    assert len(affinity) == 0
