"""Fill in the middle: prompts of completions with a `suffix`, for models trained with markers for it. Pure.

A model is recognized by the markers among its added tokens. The formats are those documented by the models' authors:
prefix, suffix, middle (Qwen, StarCoder, CodeGemma, Granite, GLM, DeepSeek, CodeLlama), or suffix first (Codestral,
Seed).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PREFIX, SUFFIX = "prefix", "suffix"


@dataclass(frozen=True, slots=True)
class FimFormat:
    """Markers of one model family, in the order of the prompt."""

    prompt: tuple[str, ...]
    """Markers, with `PREFIX` and `SUFFIX` as placeholders of the texts."""
    ends: tuple[str, ...] = ()
    """Markers that end the middle, if the tokenizer has them."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Return the tokens that the prompt needs."""
        return tuple(part for part in self.prompt if part not in (PREFIX, SUFFIX))


def _psm(prefix: str, suffix: str, middle: str, *ends: str) -> FimFormat:
    return FimFormat((prefix, PREFIX, suffix, SUFFIX, middle), (prefix, suffix, middle, *ends))


FORMATS: Sequence[FimFormat] = (
    _psm(
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        "<|fim_pad|>",
        "<|file_sep|>",
        "<|file_separator|>",
        "<|repo_name|>",
        "<|endoftext|>",
    ),
    _psm("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<fim_pad>", "<file_sep>", "<filename>", "<|endoftext|>"),
    _psm("<fim-prefix>", "<fim-suffix>", "<fim-middle>", "<fim-pad>", "<|endoftext|>"),
    _psm("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>", "<|endoftext|>"),
    _psm("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>", "\u2581<EOT>"),
    FimFormat(
        ("<｜fim▁begin｜>", PREFIX, "<｜fim▁hole｜>", SUFFIX, "<｜fim▁end｜>"),
        ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", "<|EOT|>"),
    ),
    FimFormat(("[SUFFIX]", SUFFIX, "[PREFIX]", PREFIX), ("[SUFFIX]", "[PREFIX]", "[MIDDLE]")),
    FimFormat(
        ("<[fim-suffix]>", SUFFIX, "<[fim-prefix]>", PREFIX, "<[fim-middle]>"),
        ("<[fim-suffix]>", "<[fim-prefix]>", "<[fim-middle]>"),
    ),
)


@dataclass(frozen=True, slots=True)
class FillInMiddle:
    """A format in the ids of one tokenizer."""

    prompt: tuple[int | str, ...]
    end_ids: tuple[int, ...]
    """Tokens that end the middle."""

    @classmethod
    def find(cls, markers: Mapping[str, int]) -> "FillInMiddle | None":
        """Return the first format whose markers a tokenizer has; `markers` are its added tokens with their ids."""
        for one in FORMATS:
            if all(marker in markers for marker in one.markers):
                prompt = tuple(part if part in (PREFIX, SUFFIX) else markers[part] for part in one.prompt)
                return cls(prompt, tuple(markers[end] for end in one.ends if end in markers))
        return None

    def token_ids(self, prefix: Sequence[int], suffix: Sequence[int]) -> list[int]:
        """Return the prompt's ids from those of the text before and the text after the middle."""
        ids: list[int] = []
        for part in self.prompt:
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += prefix if part == PREFIX else suffix
        return ids
