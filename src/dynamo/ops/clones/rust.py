"""Copies in Rust: `.clone()`, `.to_string()`, `.to_owned()`, `.to_vec()` and `Arc::clone`, from the syntax tree."""

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from dynamo.core.errors import ConfigError
from dynamo.ops.clones.sites import Bucket, CloneSite, shortened

METHODS = frozenset({"clone", "to_string", "to_owned", "to_vec", "cloned"})
FUNCTIONS = re.compile(r"(?:Arc|Rc|Sender|CancellationToken)(?:::<.*>)?::clone$")
SHARED = re.compile(
    r"(?:^|[._])(?:arc|tx|rx|sender|receiver|token|cancel\w*|runtime|rt|handle|watch\w*|metrics?|span|client|component|endpoint|"
    r"shared|state|pool|registry|notify|semaphore|shutdown\w*|drt|ctx|context|counter|gauge|histogram)(?:\(\))?$"
)
"""Receivers whose clone is a reference count, by their last name."""
COLLECTIONS = re.compile(
    r"(?:^|[._])(?:\w*(?:tokens?|token_ids|blocks?|hashes|vec|list|ids|bytes|data|values|map|messages|events))(?:\(\))?$"
)
SPAWNS = re.compile(r"\b(?:spawn\w*|thread::spawn|tokio::spawn|block_on|retry\w*|buffer_unordered|then)$")
LOOPS = frozenset({"for_expression", "while_expression", "loop_expression"})
ITERATION = re.compile(r"\.(?:for_each|flat_map|fold|map_while|take_while|skip_while)$")
PERHAPS_ITERATION = re.compile(r"\.(?:map|filter_map|filter|inspect)$")
"""Methods of iterators and streams that `Option` and `Result` have too."""
ITERATOR = re.compile(
    r"(?:\.(?:\w*iter(?:_mut)?|drain|keys|values(?:_mut)?|chunks\w*|windows|split\w*|lines|chars|bytes|zip|enumerate|rev)\(|stream\w*$)"
)
SINGLE = re.compile(r"\.(?:find\w*|next\w*|first|last|min\w*|max\w*|get\w*|nth|position|pop\w*|collect)\b")
"""Methods of an iterator that return one value."""
RETRIES = re.compile(r"Retry|Migrat")
COLD_MACROS = frozenset(
    {"format", "println", "panic", "bail", "anyhow", "ensure", "assert", "assert_eq", "unreachable"}
)
COLD_CALLS = re.compile(r"(?:map_err|ok_or_else|ok_or|with_context|context|unwrap_or_else|expect|Err|anyhow)$")
STOPS = frozenset({"function_item", "source_file"})


@cache
def parser() -> Any:
    """Return the parser. Raise `ConfigError` if its packages are not installed."""
    try:
        import tree_sitter_rust
        from tree_sitter import Language, Parser
    except ImportError:
        raise ConfigError("Rust sources need tree-sitter: pip install tree-sitter tree-sitter-rust") from None
    return Parser(Language(tree_sitter_rust.language()))


def rust_sites(path: str, source: bytes) -> list[CloneSite]:
    """Return the copies in a file. Raise `ConfigError` without the parser."""
    return list(_walk(path, parser().parse(source).root_node))


def _walk(path: str, root: Any) -> Iterator[CloneSite]:
    stack = [root]
    while stack:
        node = stack.pop()
        stack += reversed(node.children)
        if node.type == "call_expression" and (found := _copied(node)) is not None:
            yield _site(path, node, *found)
        elif node.type == "token_tree":  # Arguments of a macro, which are not parsed.
            for at, method, receiver in _copied_tokens(node.children):
                yield _site(path, at, method, receiver)


def _copied(call: Any) -> tuple[str, str] | None:
    """Return the method and the receiver of a copy; None for another call."""
    function = call.child_by_field_name("function")
    arguments = call.child_by_field_name("arguments")
    if function is None or arguments is None:
        return None
    if function.type == "field_expression":
        method, receiver = _text(function.child_by_field_name("field")), function.child_by_field_name("value")
        return (method, _text(receiver)) if method in METHODS and not arguments.named_child_count else None
    if arguments.named_child_count == 1 and FUNCTIONS.search(_text(function)):
        return _text(function), _text(arguments.named_children[0])
    return None


def _copied_tokens(tokens: list[Any]) -> Iterator[tuple[Any, str, str]]:
    """Yield the copies among the tokens of a macro: the token of the method, its name, and the receiver."""
    for at in range(2, len(tokens) - 1):
        method = _text(tokens[at])
        if method not in METHODS or _text(tokens[at - 1]) != "." or _text(tokens[at + 1]) != "()":
            continue
        start = at - 1
        while start > 0 and (
            _text(tokens[start - 1]) == "." or tokens[start - 1].type in {"identifier", "self", "token_tree"}
        ):
            start -= 1
        receiver = "".join(_text(one) for one in tokens[start : at - 1])
        yield tokens[at], method, receiver


def _site(path: str, call: Any, kind: str, receiver: str) -> CloneSite:
    parents = list(_parents(call))
    function = next((one for one in parents if one.type == "function_item"), None)
    within = _within(parents)
    is_test = _is_test(path, parents)
    statement = next((one for one in parents if one.type.endswith(("_statement", "_declaration"))), call)
    if call.type == "identifier":
        text = f"{receiver}.{kind}()"
    else:
        text = _text(statement if statement.end_byte - statement.start_byte < 200 else call.parent or call)
    return CloneSite(
        path=path,
        line=_name_of(call).start_point[0] + 1,
        snippet=shortened(text),
        kind=kind,
        bucket=_bucket(call, kind, receiver, parents, within, is_test=is_test),
        function="" if function is None else _text(function.child_by_field_name("name")),
        is_in_loop=any(one.type in LOOPS or _is_iteration(one) for one in within),
        is_async=function is not None and "async" in _text(function)[: _text(function).find("fn ") + 1],
        is_test=is_test,
    )


def _bucket(call: Any, kind: str, receiver: str, parents: list[Any], within: list[Any], *, is_test: bool) -> Bucket:
    if is_test or any(_is_cold(one) for one in within):
        return Bucket.COLD
    if "::" in kind or SHARED.search(receiver):
        return Bucket.SHARED
    if any(one.type == "async_block" or _is_call(one, SPAWNS) or _is_moving(one) for one in within):
        return Bucket.ASYNC
    if receiver.startswith("self.") and any(
        one.type == "impl_item" and RETRIES.search(_text(one.child_by_field_name("type"))) for one in parents
    ):
        return Bucket.ASYNC  # The original is kept for the next attempt.
    if receiver.startswith('"'):
        return Bucket.COLD  # A literal has to be made into an owned string once.
    parent = call.parent
    if parent is not None and parent.type == "reference_expression":
        return Bucket.BORROW  # A reference to a copy that ends with the statement.
    function = next((one for one in parents if one.type == "function_item"), None)
    loops = [one for one in within if one.type in LOOPS]
    if loops and function is not None and _is_consumable(receiver, loops[0], function):
        return Bucket.MOVE  # `into_iter` instead of a loop over references.
    in_loop = bool(loops)
    is_name = re.fullmatch(r"[a-z_][a-z0-9_]*", receiver) is not None
    if is_name and function is not None and _is_reference(receiver, function):
        return Bucket.API  # The caller lends the value.
    is_closure = any(one.type == "closure_expression" for one in within)
    if is_name and function is not None and not in_loop and not is_closure and kind != "to_string":
        after = function.text[call.end_byte - function.start_byte :].decode(errors="replace")
        if not re.search(rf"\b{re.escape(receiver)}\b", after):
            return Bucket.MOVE
    if kind in {"to_vec", "cloned"} or COLLECTIONS.search(receiver):
        return Bucket.API
    return Bucket.BORROW


def _is_consumable(receiver: str, loop: Any, function: Any) -> bool:
    """Return whether a loop over `&name` copies a part of its item, and the function does not use `name` afterwards."""
    source, item = loop.child_by_field_name("value"), _text(loop.child_by_field_name("pattern"))
    if source is None or source.type != "reference_expression" or not receiver.startswith(f"{item}."):
        return False
    name = _text(source.named_children[-1])
    if not re.fullmatch(r"[a-z_][a-z0-9_]*", name) or _is_reference(name, function):
        return False
    outer = next((one for one in _within(list(_parents(loop))) if one.type in LOOPS), None)
    after = function.text[loop.end_byte - function.start_byte :].decode(errors="replace")
    return outer is None and not re.search(rf"\b{re.escape(name)}\b", after)


def _is_iteration(node: Any) -> bool:
    """Return whether a call repeats its closure; `map` of an `Option` does not."""
    if _is_call(node, ITERATION):
        return True
    if not _is_call(node, PERHAPS_ITERATION):
        return False
    chain = _text(node.child_by_field_name("function").child_by_field_name("value"))
    sources = [found.start() for found in ITERATOR.finditer(chain)]
    singles = [found.start() for found in SINGLE.finditer(chain)]
    return bool(sources) and sources[-1] > max(singles, default=-1)


def _name_of(call: Any) -> Any:
    """Return the node of the method's name, which may be lines below the receiver."""
    function = call.child_by_field_name("function")
    return (None if function is None else function.child_by_field_name("field")) or call


def _is_reference(name: str, function: Any) -> bool:
    """Return whether a parameter of a function is a reference."""
    parameters = function.child_by_field_name("parameters")
    for one in () if parameters is None else parameters.named_children:
        if one.type == "parameter" and _text(one.child_by_field_name("pattern")).removeprefix("mut ") == name:
            return _text(one.child_by_field_name("type")).startswith("&")
    return False


def _within(parents: list[Any]) -> list[Any]:
    """Return the parents inside the function."""
    found = []
    for one in parents:
        if one.type in STOPS:
            break
        found.append(one)
    return found


def _parents(node: Any) -> Iterator[Any]:
    at = node.parent
    while at is not None:
        yield at
        at = at.parent


def _is_call(node: Any, names: "re.Pattern[str]") -> bool:
    if node.type != "call_expression":
        return False
    function = node.child_by_field_name("function")
    return function is not None and names.search(_text(function)) is not None


def _is_moving(node: Any) -> bool:
    return node.type == "closure_expression" and any(child.type == "move" for child in node.children)


def _is_cold(node: Any) -> bool:
    if node.type == "macro_invocation":
        name = _text(node.child_by_field_name("macro")).rpartition("::")[2]
        return name in COLD_MACROS or name in {"debug", "trace", "info", "warn", "error"}
    return _is_call(node, COLD_CALLS)


def _is_test(path: str, parents: list[Any]) -> bool:
    if re.search(r"(?:^|/)(?:tests?|benches|examples)(?:/|\.rs$)|_tests?\.rs$", path):
        return True
    for one in parents:
        if one.type in {"mod_item", "function_item"}:
            before = one.prev_sibling
            while before is not None and before.type == "attribute_item":
                if re.search(r"\btest\b", _text(before)):
                    return True
                before = before.prev_sibling
    return False


def _text(node: Any) -> str:
    return "" if node is None else node.text.decode(errors="replace")
