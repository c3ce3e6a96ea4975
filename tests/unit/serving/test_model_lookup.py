"""The look-up of a model returns a ready worker set, or an error that states what is missing."""

from collections import Counter
from unittest.mock import Mock

import pytest

from dynamo.core.errors import NotFound, NotReady
from dynamo.serving.model_lookup import DEPARTED_MAX, DepartedModels, check_name, choose_set
from dynamo.serving.served_model import ServedModel


def worker_set(workers: int = 1, *, is_ready: bool = True, has_begun: bool = True, kinds: str = "Chat") -> ServedModel:
    made = Mock(spec=ServedModel, is_ready=is_ready, has_begun=has_begun, workers_min=3)
    made.card = Mock(model_type=kinds.split())
    made.worker_ids.return_value = list(range(workers))
    return made


def test_set_of_the_requested_kind_that_is_ready_is_chosen() -> None:
    ready = worker_set()
    assert choose_set("m", "Chat", [worker_set(is_ready=False), ready, worker_set(kinds="Embedding")]) is ready


def test_sets_receive_requests_in_proportion_to_their_workers() -> None:
    small, large = worker_set(1), worker_set(9)
    chosen = Counter(choose_set("m", "Chat", [small, large]) is large for _ in range(500))
    assert chosen[True] > 3 * chosen[False] > 0


@pytest.mark.parametrize(
    ("only", "missing"),
    [
        (worker_set(2, is_ready=False, has_begun=False), "2 of the 3 workers required at startup"),
        (worker_set(is_ready=False), "no prefill worker"),
        (worker_set(0, is_ready=False), "None of its workers is reachable"),
    ],
)
def test_error_of_a_model_that_is_not_ready_states_what_is_missing(only: ServedModel, missing: str) -> None:
    with pytest.raises(NotReady, match=missing):
        choose_set("m", "Chat", [only])


def test_model_that_does_not_serve_the_kind_is_not_found() -> None:
    with pytest.raises(NotFound, match="does not serve embedding"):
        choose_set("m", "Embedding", [worker_set()])


def test_name_that_is_longer_than_any_model_is_not_repeated() -> None:
    check_name("m" * 1024)
    with pytest.raises(NotFound, match="the name has 1025 characters; at most 1024") as raised:
        check_name("m" * 1025)
    assert "mm" not in str(raised.value)


def test_departed_model_is_remembered_with_its_endpoint_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("dynamo.serving.model_lookup.time.monotonic", lambda: now)
    departed = DepartedModels()
    departed.add(["m", "alias"], "ns.backend.generate")
    assert departed.endpoint_of("m") == departed.endpoint_of("alias") == "ns.backend.generate"
    assert departed.endpoint_of("other") is None
    now = 110.0
    assert departed.endpoint_of("m") is None


def test_number_of_departed_models_is_bounded() -> None:
    departed = DepartedModels()
    departed.add(["first"], "ns.backend.generate")
    departed.add([f"m{number}" for number in range(DEPARTED_MAX)], "ns.backend.generate")
    assert departed.endpoint_of("first") is None
    assert departed.endpoint_of("m0") is not None
