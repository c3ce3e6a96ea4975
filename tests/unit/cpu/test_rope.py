"""The kinds are compared with transformers in tests/integration; here are the checks that do not need it."""

from typing import Any

import numpy as np
import pytest

from dynamo.core.errors import ConfigError
from dynamo.cpu.rope import Rope

LONG = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "original_max_position_embeddings": 64, "factor": 4.0}


def rope(max_positions: int = 256, **parameters: Any) -> Rope:
    return Rope.read({"rope_parameters": parameters}, 8, max_positions)


def angles(rotations: Any) -> Any:
    return np.angle(rotations[1])


def test_rope_does_not_rotate_position_zero() -> None:
    assert np.array_equal(rope().rotations(4)[0], np.ones(4))


def test_rope_rotates_each_position_by_the_same_angle() -> None:
    rotations = rope().rotations(40)
    assert np.allclose(rotations[30] * rotations[7], rotations[37], atol=1e-5)


def test_rope_linear_scaling_slows_all_pairs() -> None:
    assert np.allclose(angles(rope(rope_type="linear", factor=4.0).rotations(8)) * 4, angles(rope().rotations(8)))


def test_rope_accepts_older_spellings() -> None:
    older = Rope.read({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 1000.0}, 8, 256)
    assert older == rope(rope_type="linear", factor=2.0, rope_theta=1000.0)


def test_rope_dynamic_scaling_starts_beyond_the_trained_length() -> None:
    stretched = rope(rope_type="dynamic", factor=2.0)
    assert np.array_equal(stretched.rotations(256), rope().rotations(256))
    assert angles(stretched.rotations(512))[-1] < angles(rope().rotations(512))[-1]


def test_rope_only_dynamic_scaling_extends_the_trained_length() -> None:
    assert rope(rope_type="dynamic", factor=2.0).reach == 512
    assert rope(rope_type="linear", factor=2.0).reach == 256


def test_rope_yarn_keeps_fast_pairs_and_divides_slow_ones() -> None:
    plain, yarn = rope(4096), rope(4096, rope_type="yarn", factor=4.0, original_max_position_embeddings=1024)
    ratio = angles(plain.rotations(2)) / angles(yarn.rotations(2))
    assert ratio[0] == pytest.approx(1.0, rel=1e-4)
    assert ratio[-1] == pytest.approx(4.0, rel=1e-3)
    assert np.abs(yarn.rotations(2)[1]) == pytest.approx(0.1 * np.log(4.0) + 1)


def test_rope_yarn_amplitude_is_configurable() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert np.abs(rope(**yarn, attention_factor=1.25).rotations(2)[1]) == pytest.approx(1.25)
    assert np.abs(rope(**yarn, mscale=1.0, mscale_all_dim=1.0).rotations(2)[1]) == pytest.approx(1.0)


def test_rope_longrope_selects_factors_by_the_served_length() -> None:
    longrope = rope(rope_type="longrope", **LONG)
    assert np.allclose(angles(longrope.rotations(64)), angles(rope().rotations(64)))
    assert np.allclose(angles(longrope.rotations(65)) * 4, angles(rope().rotations(65)))


def test_rope_llama3_divides_only_long_wavelengths() -> None:
    llama3 = rope(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=256,
    )
    ratio = angles(rope().rotations(2)) / angles(llama3.rotations(2))
    assert ratio[0] == pytest.approx(1.0)
    assert ratio[-1] == pytest.approx(8.0, rel=1e-4)


def test_rope_refuses_a_wrong_number_of_factors() -> None:
    with pytest.raises(ConfigError, match="3 factors for 4 pairs"):
        rope(rope_type="longrope", **(LONG | {"short_factor": [1.0] * 3}))
