"""Model types: a model's input, the APIs that it serves, and the stage of a worker."""

import enum


class ModelInput(enum.Enum):
    """Form of the requests that a worker receives."""

    Text = "Text"
    """The client's request; the worker responds with OpenAI's chunks."""
    Tokens = "Tokens"
    """Token ids; the frontend applies the template and the tokenizer."""
    Tensor = "Tensor"
    """Tensors of a KServe request."""


class ModelType(enum.Flag):
    """Parts of the OpenAI API that a model serves; combine with `|`."""

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
    """Upstream's older mark of a prefill worker; serves no API."""

    @property
    def names(self) -> list[str]:
        """Names of the combined types, in order."""
        return [one.name for one in ModelType if one.name and one in self]

    @property
    def on_card(self) -> str:
        """Form in the model's card."""
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
