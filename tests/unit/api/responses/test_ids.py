"""Ids of responses and items."""

import pytest

from dynamo.api.responses.ids import INPUT, item_id, key_of, new_response_id


def test_item_id_has_the_key_of_its_response() -> None:
    response = new_response_id()
    assert key_of(item_id("msg", response, 2)) == key_of(item_id("fc", response, INPUT)) == key_of(response)
    assert item_id("msg", response, 2) != item_id("msg", response, INPUT + 2)


def test_every_response_id_has_a_unique_key() -> None:
    assert len({key_of(new_response_id()) for _ in range(1000)}) == 1000


@pytest.mark.parametrize(
    "id", ["", "resp_", "resp_../../etc/passwd", "resp_" + "g" * 32, "resp_" + "0" * 31, "RESP_" + "0" * 32, "0" * 32]
)
def test_foreign_id_has_no_key(id: str) -> None:
    assert key_of(id) is None
