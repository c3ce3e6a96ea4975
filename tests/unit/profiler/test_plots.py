from pathlib import Path

import pytest

from dynamo.core.errors import ConfigError
from dynamo.profiler import plots
from dynamo.profiler.curves import DecodeCurve, PrefillCurve
from dynamo.profiler.thorough.journal import Measurement

PNG = b"\x89PNG\r\n"


def written(directory: Path) -> set[str]:
    """Return the names of the files, all of which are pictures."""
    found = [path for path in directory.rglob("*") if path.is_file()]
    assert all(path.read_bytes().startswith(PNG) for path in found)
    return {str(path.relative_to(directory)) for path in found}


def test_curves_are_drawn_with_the_names_of_the_released_profiler(tmp_path: Path) -> None:
    prefill, decode = PrefillCurve(), DecodeCurve(max_kv_tokens=10_000)
    for isl in (100, 1000, 2000):
        prefill.add(isl, 10 + isl / 10, gpus=2)
        for concurrency in (1, 4):
            decode.add(isl, concurrency, 10.0 + concurrency, 90.0)
    plots.draw_curves(tmp_path, prefill, decode)
    assert written(tmp_path) == {
        "selected_prefill_interpolation/prefill_ttft_interpolation.png",
        "selected_prefill_interpolation/prefill_throughput_interpolation.png",
        "selected_decode_interpolation/decode_itl_interpolation.png",
        "selected_decode_interpolation/decode_throughput_interpolation.png",
    }


def test_candidates_are_drawn_without_failed_measurements(tmp_path: Path) -> None:
    points = [
        Measurement(engine="tp1", kind="prefill", isl=100, osl=5, concurrency=1, ttft_ms=20),
        Measurement(engine="tp1", kind="decode", isl=100, osl=50, concurrency=4, itl_ms=10, tok_s=400),
        Measurement(engine="tp2", kind="decode", isl=100, osl=50, concurrency=4, error="1 requests were not answered"),
    ]
    plots.draw_candidates(tmp_path, points, {"tp1": (1, 1), "tp2": (2, 1)})
    assert written(tmp_path) == {"prefill_performance.png", "decode_performance.png", "cost_sla.png"}


def test_unwritable_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--output-dir: cannot write"):
        plots.save(tmp_path / "file" / "a.png", "t", "x", "y", lambda axes: axes.plot([1], [1]))
