"""Machine: GPUs for workers, as their parallel sizes or the command line require."""

import pytest

from dynamo.cli.machine import devices_of
from dynamo.cli.options import ServeConfig
from dynamo.core.errors import ConfigError

FOUR = {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}


def test_each_worker_receives_the_gpus_of_its_parallel_sizes() -> None:
    pool = devices_of(ServeConfig(workers=2), 2, FOUR)
    assert pool is not None
    assert (pool.take("a"), pool.take("b")) == (("0", "1"), ("2", "3"))


def test_workers_share_all_gpus_when_configured_or_when_none_are_required() -> None:
    assert devices_of(ServeConfig(workers=9, gpus_per_worker=0), 2, FOUR) is None
    assert devices_of(ServeConfig(), 0, FOUR) is None


def test_engine_built_for_cpus_requires_no_gpu() -> None:
    assert devices_of(ServeConfig(), 1, {"CUDA_VISIBLE_DEVICES": ""}) is None


def test_too_few_gpus_are_refused_with_the_number() -> None:
    with pytest.raises(ConfigError, match="workers 3: must be at most 2, for which the GPUs suffice"):
        devices_of(ServeConfig(workers=2, prefill_workers=1), 2, FOUR)
    with pytest.raises(ConfigError, match="--gpus-per-worker 8: must be at most 4, the GPUs of this machine"):
        devices_of(ServeConfig(gpus_per_worker=8), 1, FOUR)
    with pytest.raises(ConfigError, match="GPUs per worker 8: must be at most 4"):
        devices_of(ServeConfig(), 8, FOUR)
