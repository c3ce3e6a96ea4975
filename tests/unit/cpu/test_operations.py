import numpy as np
import pytest

from dynamo.cpu import operations
from dynamo.cpu.operations import GEMV_ROWS_MAX, THIN_ROWS_MAX, gated_silu, normalise, project


@pytest.mark.parametrize("rows", [1, GEMV_ROWS_MAX, GEMV_ROWS_MAX + 1, THIN_ROWS_MAX, THIN_ROWS_MAX + 1])
def test_operations_matrix_product_is_equal_in_every_layout(rows: int) -> None:
    rng = np.random.default_rng(rows)
    x, matrix = rng.standard_normal((rows, 24)).astype(np.float32), rng.standard_normal((40, 24)).astype(np.float32)
    out, scratch = np.empty((rows, 40), np.float32), np.empty(rows * 40, np.float32)
    project(x, matrix, out, scratch)
    assert np.allclose(out, x @ matrix.T, atol=1e-5)


def test_operations_norm_may_overwrite_its_input() -> None:
    x = np.array([[3.0, 4.0], [0.0, 0.0]], np.float32)
    normalise(x, 1e-6, x)
    assert np.allclose(x, [[3 / 12.5**0.5, 4 / 12.5**0.5], [0, 0]], atol=1e-6)


def test_operations_silu_does_not_overflow() -> None:
    gate = np.array([[-400.0, -1.0, 0.0, 2.0, 400.0]], np.float32)
    out = np.empty((1, 5), np.float32)
    gated_silu(gate / 2, np.full((1, 5), 3.0, np.float32), out)
    assert np.allclose(out, [[0, 3 * -1 / (1 + np.exp(1.0)), 0, 3 * 2 / (1 + np.exp(-2.0)), 1200]], atol=1e-5)


def test_operations_silu_computes_every_row_of_a_long_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "STRIP_NUMBERS", 16)
    gate, up = np.random.default_rng(0).standard_normal((2, 7, 5)).astype(np.float32)
    out = np.full((7, 5), np.nan, np.float32)
    gated_silu(gate / 2, up, out)
    assert np.allclose(out, gate / (1 + np.exp(-gate)) * up, atol=1e-6)
