"""Speculative algorithms."""


class SpeculativeAlgorithm:
    def __init__(self, name: str) -> None:
        self.name = name

    @classmethod
    def from_string(cls, name: str) -> "SpeculativeAlgorithm":
        return cls(name)

    def is_eagle(self) -> bool:
        return self.name == "EAGLE"
