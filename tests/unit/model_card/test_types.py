"""Model types: spelled as cards and as upstream's users spell them."""

import pytest

from dynamo.llm import ModelInput, ModelType, WorkerType

BOTH = ModelType.Chat | ModelType.Completions


def test_model_types_are_combined_and_compared() -> None:
    assert ModelType.Completions | ModelType.Chat == BOTH
    assert len({BOTH, ModelType.Completions | ModelType.Chat}) == 1
    assert ModelType.Chat != BOTH


@pytest.mark.parametrize(
    ("kind", "on_card", "text"),
    [
        (BOTH, "Chat | Completions", "chat,completions"),
        (ModelType.Embedding, "Embedding", "embedding"),
        (ModelType.Empty, "", ""),
        (ModelType.TensorBased | ModelType.Chat, "Chat | TensorBased", "chat,tensorbased"),
    ],
)
def test_model_type_has_a_card_name_and_a_display_name(kind: ModelType, on_card: str, text: str) -> None:
    assert (kind.on_card, str(kind)) == (on_card, text)


def test_model_type_reports_its_supported_endpoints() -> None:
    assert BOTH.supports_chat()
    assert not (BOTH.supports_embedding() or BOTH.supports_classify() or BOTH.supports_pooling())
    every = ModelType.Embedding | ModelType.Classify | ModelType.Pooling | ModelType.Rerank
    assert every.supports_embedding() and every.supports_classify() and every.supports_pooling()
    assert every.supports_rerank() and not every.supports_chat()


def test_model_input_and_worker_type_have_the_names_of_cards() -> None:
    assert [one.value for one in ModelInput] == ["Text", "Tokens", "Tensor"]
    assert [str(one) for one in WorkerType] == ["prefill", "decode", "encode", "aggregated"]
