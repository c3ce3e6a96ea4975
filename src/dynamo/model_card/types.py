"""Model types: what a model takes, what it is asked for, and which stage of it a worker is (serving-plane.md §2.3)."""

import enum


class ModelInput(enum.Enum):
    """What a worker wants to be sent."""

    Text = "Text"
    """The request as the client wrote it; the worker answers with OpenAI's chunks."""
    Tokens = "Tokens"
    """Token ids; the frontend has the template and the tokenizer."""
    Tensor = "Tensor"
    """Tensors of a KServe request."""


class ModelType(enum.Flag):
    """What of the OpenAI API a model serves; combine with `|`."""

    Empty = 0
    Chat = enum.auto()
    Completions = enum.auto()
    Embedding = enum.auto()
    Classify = enum.auto()
    Pooling = enum.auto()
    Rerank = enum.auto()
    TensorBased = enum.auto()
    Images = enum.auto()
    Audios = enum.auto()
    Videos = enum.auto()
    Realtime = enum.auto()
    Prefill = enum.auto()
    """No surface: upstream's older mark of a prefill worker."""

    @property
    def names(self) -> list[str]:
        """The types it is made of, in order."""
        return [one.name for one in ModelType if one.name and one in self]

    @property
    def on_card(self) -> str:
        """As the model's card spells it."""
        return " | ".join(self.names)

    def __str__(self) -> str:
        return ",".join(self.names).lower()

    def supports_chat(self) -> bool:
        return ModelType.Chat in self

    def supports_embedding(self) -> bool:
        return ModelType.Embedding in self

    def supports_classify(self) -> bool:
        return ModelType.Classify in self

    def supports_pooling(self) -> bool:
        return ModelType.Pooling in self

    def supports_rerank(self) -> bool:
        return ModelType.Rerank in self


class WorkerType(enum.Enum):
    """The stage that a worker handles."""

    Prefill = "prefill"
    Decode = "decode"
    Encode = "encode"
    Aggregated = "aggregated"

    def __str__(self) -> str:
        return self.value
