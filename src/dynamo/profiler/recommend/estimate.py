"""Errors of the estimated step times, and where they come from. Pure."""

from dataclasses import dataclass

from dynamo.profiler.recommend.points import Correction

FEW_POINTS_ERROR = 0.5
"""Share of the published error that remains where too few points are given to leave one out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateError:
    """Median relative errors, 0 to 1, and the source of the estimate."""

    itl: float
    ttft: float
    source: str

    def corrected(self, found: Correction) -> "EstimateError":
        """Return the errors after a correction: those on points that were left out, where there were any."""
        return EstimateError(
            itl=self.itl if found.itl_error is None else found.itl_error,
            ttft=self.ttft if found.ttft_error is None else found.ttft_error,
            source=f"{self.source}, corrected by {found.source}",
        )

    def text(self) -> str:
        """Return the errors in words."""
        return f"TTFT ±{100 * self.ttft:.0f} %, ITL ±{100 * self.itl:.0f} %"
