"""The mocker's flags that are not honoured yet."""

import pytest

from dynamo.core.errors import ConfigError, InvalidArgument
from dynamo.core.waiting import Waiting, declared_flags, without_waiting
from dynamo.mocker.advertised import WAITING
from dynamo.mocker.canonical import settings_of
from dynamo.mocker.config import MockerConfig

DECLARED = declared_flags(MockerConfig)


@pytest.mark.parametrize("one", [one for one in WAITING if one.flag not in DECLARED], ids=lambda one: one.flag)
def test_every_one_of_them_is_refused_and_taken_with_its_default(one: Waiting) -> None:
    with pytest.raises(ConfigError, match=one.flag):
        without_waiting(
            WAITING, [f"{one.flag}={not one.default if isinstance(one.default, bool) else 'otherwise'}"], {}, DECLARED
        )
    assert without_waiting(WAITING, [f"{one.flag}={one.default}"], {}, DECLARED) == []


def test_the_frontends_variables_are_not_refused_here() -> None:
    assert without_waiting(WAITING, [], {"DYN_ROUTER_TEMPERATURE": "1"}, DECLARED) == []


def test_who_asks_for_aisimulate_hears_what_it_is() -> None:
    with pytest.raises(ConfigError, match=r"package aisimulate.*--planner-profile-data"):
        without_waiting(WAITING, ["--ais-perf-model"], {}, DECLARED)
    with pytest.raises(ConfigError, match="--num-gpu-blocks-override"):
        without_waiting(WAITING, ["--gpu-memory-utilization", "0.5"], {}, DECLARED)
    ais = {"engine": {"timing_model": {"type": "external", "provider": "ais", "config": {}}}}
    with pytest.raises(InvalidArgument, match="package aisimulate"):
        settings_of(ais)
