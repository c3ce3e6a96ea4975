"""Replay fit: the published hardware points of one engine, each predicted from the others.

    python -m benchmarks.replay_fit

NVIDIA measured MiniMax on four B200 (tensor parallel), prompts and outputs of 1,024 tokens, concurrency 4 to 64, and
the released mocker's errors against them without a fit; ours must be smaller.
"""

import sys

from dynamo.mocker.simulation.timing import FittedTiming
from dynamo.replay.fit import FitConfig, Measured, cross_validation, explained, refined

GPUS = 4
LENGTH = 1024
PUBLISHED = {"ttft_ms": 17.3, "tpot_ms": 8.3, "tok_s": 6.6}
"""The released mocker's mean absolute errors in percent."""
HARDWARE = [
    Measured(at_once, LENGTH, LENGTH, ttft_ms, tpot_ms, GPUS * tok_s_of_gpu)
    for at_once, ttft_ms, tpot_ms, tok_s_of_gpu in (
        (4, 121.5, 9.58, 99.8),
        (8, 100.7, 10.12, 191.1),
        (16, 117.0, 12.31, 314.8),
        (32, 146.1, 16.32, 474.6),
        (64, 220.4, 20.64, 747.1),
    )
]


def main() -> int:
    """Print the errors; return 1 if one is larger than the published one."""
    config = FitConfig()
    timing: FittedTiming = refined(HARDWARE, config)
    found = cross_validation(HARDWARE, config)
    inside = explained(HARDWARE, timing, config)["mean_absolute_error_percent"]
    outside = found["mean_absolute_error_percent"]
    print(
        "| at once | TTFT ms | predicted | TPOT ms | predicted | tok/s | predicted |\n|---:|---:|---:|---:|---:|---:|---:|"
    )
    for point in found["points"]:
        seen, predicted = point["measured"], point["foretold"]
        figures = (f"{seen[name]:,.1f} | {predicted[name]:,.1f}" for name in PUBLISHED)
        print(f"| {seen['concurrency']} | {' | '.join(figures)} |")
    print("\n| mean absolute error, % | fitted to all | each from the others | published |\n|---|---:|---:|---:|")
    for name, published in PUBLISHED.items():
        print(f"| {name} | {inside[name]:.1f} | {outside[name]:.1f} | {published} |")
    return int(any(outside[name] > published for name, published in PUBLISHED.items()))


if __name__ == "__main__":
    sys.exit(main())
