"""Finish reasons and stop strings in the output of engines."""


def normalize_finish_reason(finish_reason: str) -> str:
    """Return `cancelled` for the reasons of an aborted request, any other reason unchanged."""
    return "cancelled" if finish_reason and finish_reason.startswith("abort") else finish_reason


def trailing_stop_prefix_len(text: str, stop_strings: set[str]) -> int:
    """Return the length of the longest end of `text` that may be the beginning of a stop string."""
    lengths = (size for stop in stop_strings for size in range(1, len(stop) + 1) if text.endswith(stop[:size]))
    return max(lengths, default=0)
