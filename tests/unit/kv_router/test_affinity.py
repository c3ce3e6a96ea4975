"""A session keeps its worker until its binding expires."""

from dynamo.kv_router.affinity import Affinity

HERE, THERE = (1, 0), (2, 1)


def test_session_affinity_keeps_its_rank_until_idle_timeout() -> None:
    affinity = Affinity(10)
    affinity.bind("s", "a", HERE, 0)
    affinity.finish("a", 5)
    assert affinity.find("s", 14) == HERE
    assert affinity.find("s", 15) is None
    assert len(affinity) == 0


def test_session_affinity_does_not_expire_during_a_request() -> None:
    affinity = Affinity(10)
    affinity.bind("s", "a", HERE, 0)
    affinity.expire(99)
    assert affinity.find("s", 99) == HERE
    affinity.finish("a", 99)
    affinity.finish("a", 99)
    affinity.expire(110)
    assert len(affinity) == 0


def test_session_affinity_can_be_rebound_or_ended() -> None:
    affinity = Affinity(10)
    affinity.bind("s", "a", HERE, 0)
    affinity.bind("s", "b", THERE, 1)
    assert affinity.find("s", 2) == THERE
    affinity.end("s")
    affinity.end("s")
    assert affinity.find("s", 2) is None
    affinity.finish("a", 3)
    affinity.finish("b", 3)


def test_session_affinity_evicts_the_least_recently_used_session() -> None:
    affinity = Affinity(10, sessions_max=2)
    for number, session in enumerate("aba"):
        affinity.bind(session, f"r{number}", HERE, number)
    affinity.bind("c", "r9", HERE, 9)
    assert [affinity.find(session, 9) for session in "abc"] == [HERE, None, HERE]


def test_session_affinity_uses_the_newest_binding_of_any_router() -> None:
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


def test_session_affinity_expires_a_received_binding() -> None:
    affinity = Affinity(10, sessions_max=1)
    assert affinity.apply("s", HERE, (3, 1), 0)
    assert affinity.apply("s", HERE, (3, 1), 5), "the same one again keeps it"
    assert affinity.find("s", 14) == HERE
    assert affinity.find("s", 15) is None
    affinity.apply("a", HERE, (4, 1), 20)
    affinity.apply("b", HERE, (5, 1), 20)
    assert affinity.find("a", 20) is None
    assert affinity.version_of("a") is None


def test_session_affinity_keeps_a_moved_session_with_active_requests() -> None:
    affinity = Affinity(10)
    affinity.bind("s", "a", HERE, 0)
    affinity.apply("s", THERE, (9, 9), 1)
    affinity.expire(99)
    assert affinity.find("s", 99) == THERE
    affinity.finish("a", 99)
    affinity.expire(110)
    assert len(affinity) == 0
