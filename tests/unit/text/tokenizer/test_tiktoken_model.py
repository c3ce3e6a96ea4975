"""A tiktoken file is read as the `tiktoken` library reads it, without a network and through the one loader."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.conftest import CORPUS, byte_level

from dynamo.core.errors import ConfigError
from dynamo.model_card.card import ModelFiles, build_card
from dynamo.protocols.model_card import ModelDeploymentCard
from dynamo.text.tokenizer import tiktoken_model
from dynamo.text.tokenizer.tiktoken_model import KIMI, O200K, QWEN, convert, read_ranks, special_tokens
from dynamo.text.tokenizer.tokenizer import Tokenizer
from dynamo.text.tokenizer.word_tokenizer import byte_of_char

SPECIALS = {"<|im_end|>": 0, "<|im_user|>": 1, "[EOS]": 2}
TEXT = st.text(
    st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from("aB  \n\t'sé1234漢字かな😀—")), max_size=60
)


def ranks_of(pattern: str) -> dict[bytes, int]:
    """The ranks that training with a pattern leads to."""
    vocab = json.loads(byte_level(pattern, nfc=False).to_str())["model"]["vocab"]
    alphabet = byte_of_char()
    return {bytes(alphabet[char] for char in token): rank for token, rank in vocab.items()}


def write(path: Path, ranks: dict[bytes, int], model_type: str, name: str = "tiktoken.model", **config: Any) -> Path:
    """A model with a tiktoken file."""
    path.mkdir(parents=True, exist_ok=True)
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items()]
    (path / name).write_text("".join(lines))
    (path / "config.json").write_text(json.dumps({"model_type": model_type, "max_position_embeddings": 512}))
    if config:
        (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def added(ranks: dict[bytes, int]) -> dict[str, dict[str, Any]]:
    first = max(ranks.values()) + 1
    return {str(first + place): {"content": text, "special": True} for text, place in SPECIALS.items()}


Pair = tuple[Tokenizer, Any]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Pair]]:
    """Return our tokenizer, the one by words, and tiktoken's, for each pattern."""
    tiktoken = pytest.importorskip("tiktoken")
    found: dict[str, list[Pair]] = {}
    for model_type, pattern in (("kimi_k2", KIMI), ("qwen", QWEN), ("gpt_oss", O200K)):
        ranks = ranks_of(QWEN if pattern == KIMI else pattern)
        path = write(tmp_path_factory.mktemp(model_type), ranks, model_type, added_tokens_decoder=added(ranks))
        names = {
            text: token_id for token_id, (text, _) in special_tokens(ranks, {}).items() if token_id >= len(ranks) + 3
        }
        names |= {text: len(ranks) + place for text, place in SPECIALS.items()}
        theirs = tiktoken.Encoding(model_type, pat_str=pattern, mergeable_ranks=ranks, special_tokens=names)
        found[model_type] = [
            (Tokenizer.from_dir(str(path), ways), theirs) for ways in ([], ["words"], ["fastokens", "words"])
        ]
    return found


@pytest.mark.parametrize("model_type", ["kimi_k2", "qwen", "gpt_oss"])
@settings(max_examples=60, deadline=None)
@given(parts=st.lists(st.one_of(TEXT, st.sampled_from([*SPECIALS, "<|im", *CORPUS])), max_size=5))
def test_tiktoken_model_ids_equal_those_of_tiktoken(
    pairs: dict[str, list[Pair]], model_type: str, parts: list[str]
) -> None:
    text = "".join(parts)
    for ours, theirs in pairs[model_type]:
        expected = theirs.encode(text, allowed_special="all")
        assert ours.encode(text) == expected
        assert ours.encode(text, add_special_tokens=True) == expected
        assert ours.decode(expected, skip_special_tokens=False) == theirs.decode(expected)


@pytest.mark.parametrize("model_type", ["kimi_k2", "qwen", "gpt_oss"])
def test_tiktoken_model_has_the_bytes_of_every_token(pairs: dict[str, list[Pair]], model_type: str) -> None:
    for ours, theirs in pairs[model_type]:
        assert ours.vocab_size == theirs.n_vocab
        assert ours.token_bytes() == [theirs.decode_single_token_bytes(token_id) for token_id in range(theirs.n_vocab)]
        table = ours.table(skip_special_tokens=True)
        assert table.raw[ours.token_to_id("[EOS]") or 0] == b""


def test_tiktoken_model_uses_the_word_tokenizer_where_possible(pairs: dict[str, list[Pair]]) -> None:
    assert [tokenizer.backend for tokenizer, _ in pairs["qwen"][:2]] == ["tokenizers", "words"]
    assert pairs["kimi_k2"][1][0].backend == "tokenizers", "its pattern is beyond Python's `re`"


def test_tiktoken_model_of_the_first_qwen_has_unlisted_special_tokens(tmp_path: Path) -> None:
    ranks = ranks_of(QWEN)
    tokenizer = Tokenizer.from_dir(str(write(tmp_path, ranks, "qwen", "qwen.tiktoken")))
    assert tokenizer.token_to_id("<|endoftext|>") == len(ranks)
    assert tokenizer.encode("<|im_start|>user") == [len(ranks) + 1, *tokenizer.encode("user")]
    assert tokenizer.vocab_size == len(ranks) + 208


def test_tiktoken_model_of_gpt_oss_uses_o200k_from_the_configured_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = ranks_of(O200K)
    write(tmp_path / "encodings", ranks, "", "o200k_base.tiktoken")
    model = write(tmp_path / "model", ranks, "gpt_oss", "unused")
    monkeypatch.delenv("TIKTOKEN_ENCODINGS_BASE", raising=False)
    with pytest.raises(ConfigError, match=r"tokenizer\.json is missing"):
        Tokenizer.from_dir(str(model))
    monkeypatch.setenv("TIKTOKEN_ENCODINGS_BASE", str(tmp_path / "encodings"))
    tokenizer = Tokenizer.from_dir(str(model))
    ids = tokenizer.encode("<|start|>assistant<|channel|>final<|message|>hi<|return|>")
    assert [ids[0], ids[-1]] == [200006, 200002]
    assert {200005, 200008} < set(ids)
    monkeypatch.setenv("TIKTOKEN_ENCODINGS_BASE", str(tmp_path))
    with pytest.raises(ConfigError, match=r"o200k_base\.tiktoken is missing"):
        Tokenizer.from_dir(str(model))


def test_tiktoken_model_is_read_after_a_tokenizer_json(tmp_path: Path, model_dir: Path) -> None:
    write(tmp_path, {b"a": 0}, "kimi")
    (tmp_path / "tokenizer.json").write_text((model_dir / "tokenizer.json").read_text())
    assert ModelFiles.from_dir(str(tmp_path)).tokenizer.endswith("tokenizer.json")


def test_tiktoken_model_file_is_named_in_the_card(tmp_path: Path) -> None:
    ranks = ranks_of(QWEN)
    path = write(tmp_path, ranks, "kimi_k2", added_tokens_decoder=added(ranks))
    card: ModelDeploymentCard = build_card(str(path), "kimi", context_length=512, kv_cache_block_size=16)
    assert list(card.tokenizer or {}) == ["tik_token_model"]
    tokenizer = Tokenizer.from_files(ModelFiles.from_card(card))
    assert tokenizer.encode("[EOS]") == [len(ranks) + 2]


def test_tiktoken_model_split_pattern_may_be_configured(tmp_path: Path) -> None:
    ranks = ranks_of(QWEN)
    tokenizer = Tokenizer.from_dir(str(write(tmp_path, ranks, "unheard_of", pat_str=r"\S+|\s+")))
    assert tokenizer.decode(tokenizer.encode("The worker  asks")) == "The worker  asks"


def test_tiktoken_model_of_an_unknown_family_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tiktoken\.model: the split pattern for model_type 'unheard_of'"):
        Tokenizer.from_dir(str(write(tmp_path, {b"a": 0}, "unheard_of")))


@pytest.mark.parametrize("line", ["a", "not-base64! 1", "YQ== one", "YQ== 1 2"])
def test_tiktoken_model_error_names_a_broken_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "x.tiktoken"
    path.write_text(f"YQ== 0\n\n{line}\n")
    with pytest.raises(ConfigError, match=r"x\.tiktoken: line 3 is not a token"):
        read_ranks(str(path))
    path.write_text("\n")
    with pytest.raises(ConfigError, match="the file has no tokens"):
        read_ranks(str(path))


def test_tiktoken_model_reserves_unnamed_special_tokens() -> None:
    given = {"7": {"content": "<a>", "special": False}, "x": {"content": "<b>"}, "9": {"content": ""}, "10": "<c>"}
    found = special_tokens({b"a": 0, b"b": 5}, {"added_tokens_decoder": given})
    assert found[7] == ("<a>", False)
    assert found[6] == ("<|reserved_token_6|>", True)
    assert sorted(found) == list(range(6, 6 + tiktoken_model.RESERVED_TOKENS))


def test_tiktoken_model_merges_any_pair_that_makes_a_token() -> None:
    spec = json.loads(convert({b"a": 0, b"b": 1, b"ab": 2, b"bb": 3, b"abb": 4}, ".", {}))
    assert spec["model"]["merges"] == [["a", "b"], ["b", "b"], ["a", "bb"], ["ab", "b"]]
