"""The KV router avoids workers that failed, as long as another one is left."""

from hypothesis import given
from hypothesis import strategies as st

from dynamo.serving.served_model import workers_to_avoid

WORKERS = st.frozensets(st.integers(0, 5))


@given(WORKERS, WORKERS, WORKERS)
def test_worker_that_failed_the_request_is_always_avoided(
    workers: frozenset[int], exclude: frozenset[int], unsound: frozenset[int]
) -> None:
    assert workers_to_avoid(workers, exclude, unsound) >= exclude


@given(WORKERS, WORKERS, WORKERS)
def test_some_worker_is_left_unless_all_failed_the_request(
    workers: frozenset[int], exclude: frozenset[int], unsound: frozenset[int]
) -> None:
    left = workers - workers_to_avoid(workers, exclude, unsound)
    assert left == (workers - exclude - unsound or workers - exclude)


def test_unsound_worker_is_chosen_if_the_others_failed_the_request_and_one_of_them_has_left() -> None:
    failed_and_left, failed, unsound = 1, 2, 3
    assert workers_to_avoid([failed, unsound], frozenset({failed_and_left, failed}), frozenset({failed, unsound})) == {
        failed_and_left,
        failed,
    }
