from typing import Self

class Words:
    def __new__(
        cls,
        rules: bytes,
        classes: bytes,
        byte_ids: bytes,
        merges: bytes,
        added: list[tuple[bytes, int]],
        whole: list[tuple[bytes, int]],
        slots_max: int,
        seed: int,
        /,
    ) -> Self: ...
    def encode(self, text: str, /) -> list[int] | None: ...
    def encode_long(self, text: str, /) -> bytes | None: ...
    def counts(self) -> tuple[int, int, int, int]: ...
