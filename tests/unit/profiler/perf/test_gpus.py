from typing import get_args

import pytest

from dynamo.core.errors import ConfigError
from dynamo.profiler.perf.gpus import GPUS, gpu_spec
from dynamo.protocols.kubernetes.v1beta1 import GpuSku


def test_every_gpu_sku_has_a_specification() -> None:
    assert {gpu_spec(sku).sku for sku in get_args(GpuSku)} == set(GPUS)


def test_given_memory_replaces_the_data_sheet() -> None:
    assert gpu_spec("a100_sxm", 40 * 1024).memory_gib == 40


def test_narrow_weights_use_the_fastest_unit_the_gpu_has() -> None:
    assert gpu_spec("b200_sxm").tflops(4.25) == 9000
    assert gpu_spec("h100_sxm").tflops(4.25) == gpu_spec("h100_sxm").tflops(8) == 1979
    assert gpu_spec("a100_sxm").tflops(8) == gpu_spec("a100_sxm").tflops(16) == 312


def test_unknown_gpu_is_refused_with_the_allowed_values() -> None:
    with pytest.raises(ConfigError, match=r"hardware.gpuSku: 'h201': must be one of .*h200_sxm"):
        gpu_spec("h201")
