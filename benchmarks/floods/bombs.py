"""Attacks of `floods` on chats by their content: texts, numbers, templates, patterns and grammars that take long, and crowds of clients."""

import json
from collections.abc import Iterator

from benchmarks.floods.attacks import (
    CHAT,
    COMPLETIONS,
    MEGA,
    Attack,
    biases,
    chat,
    completion,
    form,
    ids,
    listed,
    many_messages,
    message,
    schema,
    text,
)

KEY = '"a":1'
RECURSIVE = '{"$defs":{"n":{"type":"object","properties":{"a":{"$ref":"#/$defs/n"},"b":{"$ref":"#/$defs/n"}}}},"$ref":"#/$defs/n"}'
LONG_LIST = '{"type":"array","items":{"type":"integer"},"minItems":10000000,"maxItems":10000000}'


def bombs() -> Iterator[Attack]:
    """Yield the attacks, the writers not yet called."""
    yield from _texts()
    yield from _values()
    yield from _templates()
    yield from _patterns()
    yield from _grammars()
    yield from _crowds()


def _texts() -> Iterator[Attack]:
    """Yield texts on which pre-tokenizers, merges or searches for special tokens may take long."""
    for name, unit in (
        ("spaces", " "),
        ("line feeds", "\\n"),
        ("digits", "7"),
        ("special tokens", "<|im_end|>"),
        ("halves of special tokens", "<|im_"),
        ("combining marks", "\u0301"),
        ("ligatures that expand", "\ufdfa"),
        ("joined emoji", "\U0001f469\u200d"),
        ("apostrophes", "'"),
    ):
        size = len(unit.encode())
        yield Attack(f"10 MB of {name}", CHAT, lambda u=unit, n=size: chat(messages=message(u * (10 * MEGA // n))))


def _values() -> Iterator[Attack]:
    """Yield JSON values that decoders may handle slowly."""
    yield Attack("a whole number of 10 MB", CHAT, lambda: chat(f'"metadata":{{"a":{"7" * (10 * MEGA)}}}'))
    yield Attack("a seed of 100,000 digits", CHAT, lambda: chat(f'"seed":{"7" * 100_000}'))
    yield Attack("a fraction of 10 MB", CHAT, lambda: chat(f'"temperature":0.{"7" * (10 * MEGA)}'))
    yield Attack("1,000,000 fractions", CHAT, lambda: chat(f'"metadata":{listed(iter(["1.2345678901e-300"] * MEGA))}'))
    yield Attack("1,000,000 equal keys", CHAT, lambda: chat(f'"metadata":{{{",".join([KEY] * MEGA)}}}'))
    yield Attack("1,000,000 keys of arguments", CHAT, lambda: chat(f'"chat_template_kwargs":{biases(MEGA)}'))
    yield Attack("10 MB of spaces between values", CHAT, lambda: chat(" " * (10 * MEGA) + '"seed":1'))


def _templates() -> Iterator[Attack]:
    """Yield short templates that compute for long."""
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{{ i * j }}{% endfor %}{% endfor %}"
    for name, template in (
        ("a template that loops", loop),
        ("a template that repeats", "{{ 'aaaaaaaa' * 999999999 }}"),
        ("a template that counts", "{{ 9 ** 9 ** 9 ** 9 }}"),
    ):
        yield Attack(name, CHAT, lambda t=template: chat(f'"chat_template":{json.dumps(t)}'))
        yield Attack(
            f"{name}, in arguments",
            CHAT,
            lambda t=template: chat(f'"chat_template_kwargs":{{"chat_template":{json.dumps(t)}}}'),
        )


def _patterns() -> Iterator[Attack]:
    """Yield regular expressions that expand."""
    for name, pattern in (
        ("nested repeats", "(((a{1,999}){1,999}){1,999}){1,999}"),
        ("nested stars", "((((a*)*)*)*)*b"),
        ("100,000 alternatives", "|".join(f"word{number}" for number in range(100_000))),
        ("10,000 groups", "(" * 10_000 + "a" + ")" * 10_000),
    ):
        yield Attack(f"a pattern of {name}", CHAT, lambda p=pattern: chat(f'"guided_regex":{json.dumps(p)}'))
        in_schema = f'{{"type":"string","pattern":{json.dumps(pattern)}}}'
        yield Attack(f"a schema with {name}", CHAT, lambda s=in_schema: chat(form(s)))


def _grammars() -> Iterator[Attack]:
    """Yield grammars and schemas that expand."""
    doubled = "root ::= r0\n" + "\n".join(f"r{n} ::= r{n + 1} r{n + 1}" for n in range(64)) + '\nr64 ::= "a"'
    rules = "root ::= r0\n" + "\n".join(f'r{n} ::= "a" r{n + 1} | r{n}' for n in range(20_000)) + '\nr20000 ::= "b"'
    yield Attack("a grammar that doubles", CHAT, lambda: chat(f'"guided_grammar":{json.dumps(doubled)}'))
    yield Attack("a grammar of 20,000 rules", CHAT, lambda: chat(f'"guided_grammar":{json.dumps(rules)}'))
    yield Attack("a schema that refers to itself", CHAT, lambda: chat(form(RECURSIVE)))
    yield Attack("a schema of 10,000,000 items", CHAT, lambda: chat(form(LONG_LIST)))
    yield Attack("a schema of doubling references", CHAT, lambda: chat(form(_doubling(64))))
    yield Attack("1,000 pictures", CHAT, lambda: chat(messages=_pictures(1000)))


def _crowds() -> Iterator[Attack]:
    """Yield large requests of many clients at the same time."""
    yield Attack("8 messages of 15 MB", CHAT, lambda: chat(messages=message(text(15 * MEGA))), clients=8)
    yield Attack("8 prompts of 1,000,000 ids", COMPLETIONS, lambda: completion(f'"prompt":{ids(MEGA)}'), clients=8)
    yield Attack("8 bodies of 100 MB", CHAT, lambda: chat(messages=message("a" * (100 * MEGA))), clients=8)
    yield Attack("16 schemas of 8,000", CHAT, lambda: chat(form(schema(8000))), clients=16)
    yield Attack("32 chats of 2,000 messages", CHAT, lambda: chat(messages=many_messages(2000)), clients=32)
    yield Attack("64 messages of 100 KB", CHAT, lambda: chat(messages=message(text(100_000))), clients=64)


def _doubling(depth: int) -> str:
    """Return a schema of which each definition refers to the next one twice."""
    both = '{{"type":"object","properties":{{"a":{{"$ref":"#/$defs/n{0}"}},"b":{{"$ref":"#/$defs/n{0}"}}}}}}'
    inner = ",".join(f'"n{number}":{both.format(number + 1)}' for number in range(depth))
    return f'{{"$defs":{{{inner},"n{depth}":{{"type":"null"}}}},"$ref":"#/$defs/n0"}}'


def _pictures(count: int) -> str:
    url = f'{{"type":"image_url","image_url":{{"url":"data:image/png;base64,{"A" * 1000}"}}}}'
    return f'{{"role":"user","content":[{",".join([url] * count)}]}}'
