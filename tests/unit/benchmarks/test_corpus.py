"""The benchmark's model directory and prompts."""

import json
import os

import pytest
from benchmarks import corpus
from tokenizers import Tokenizer

TEXTS = ['"""Return the number of items.\n\nThe caller owns the list."""\n    return len(items) + 1\n' * 40]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("model"))
    corpus.write_model(path, [*TEXTS, " able also been both call case " * 50])
    return path


@pytest.fixture(scope="module")
def tokenizer(model):
    return Tokenizer.from_file(os.path.join(model, "tokenizer.json"))


def test_model_config_has_ids_of_its_tokenizer(model, tokenizer):
    with open(os.path.join(model, "config.json")) as file:
        config = json.load(file)
    assert config["vocab_size"] == tokenizer.get_vocab_size()
    assert tokenizer.id_to_token(config["eos_token_id"]) == corpus.TURN_END


def test_chat_template_equals_the_render_function(model):
    jinja2 = pytest.importorskip("jinja2")
    with open(os.path.join(model, "tokenizer_config.json")) as file:
        template = jinja2.Template(json.load(file)["chat_template"])
    messages = [{"role": "user", "content": "How many?\n"}]
    assert template.render(messages=messages, add_generation_prompt=True) == corpus.render("How many?\n")


@pytest.mark.parametrize("is_chat", [True, False])
def test_prompts_have_the_exact_token_count_with_every_nonce(tokenizer, is_chat):
    made = corpus.make_prompts(tokenizer, TEXTS, 40, 8, is_chat=is_chat)
    nonces = ["".join(made.words[:4]), "".join(made.words[-4:])]
    whole = [nonce + text for text in made.texts for nonce in nonces]
    lengths = {len(tokenizer.encode(corpus.render(text) if is_chat else text).ids) for text in whole}
    assert lengths == {40}


def test_nonce_words_are_one_token_each(tokenizer):
    words = corpus.nonce_words(tokenizer)
    assert " able" in words
    assert {len(tokenizer.encode(word).ids) for word in words} == {1}


def test_cache_directory_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("DYNAMO_BENCH_CACHE", str(tmp_path))
    assert corpus.cache_dir() == str(tmp_path)
