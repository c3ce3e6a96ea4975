"""Tally: count, sum and variance of a changing collection of numbers. Exact for whole numbers."""


class Tally:
    """Running sums of a collection that is not stored."""

    __slots__ = ("count", "squares", "total")

    def __init__(self) -> None:
        self.count = 0
        self.total = 0
        self.squares = 0

    def add(self, value: int) -> None:
        """Add a value to the collection."""
        self.count += 1
        self.total += value
        self.squares += value * value

    def remove(self, value: int) -> None:
        """Remove a value from the collection."""
        self.count -= 1
        self.total -= value
        self.squares -= value * value

    @property
    def variance(self) -> float:
        """Return the population variance; 0 for an empty collection."""
        count = self.count
        return (count * self.squares - self.total * self.total) / (count * count) if count > 1 else 0.0
