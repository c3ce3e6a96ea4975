"""Dump of a configuration."""

import pytest

from dynamo.common.config_dump.config_dumper import try_process_pydantic


def test_only_an_object_of_a_pydantic_model_has_fields() -> None:
    model = pytest.importorskip("pydantic").create_model("Model", size=(int, 1))
    assert try_process_pydantic(model()) == {"size": 1}
    assert try_process_pydantic(model) is None
    assert try_process_pydantic({"size": 1}) is None
