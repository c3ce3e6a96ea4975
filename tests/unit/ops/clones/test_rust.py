"""Copies in Rust: found in the syntax tree, and put into the bucket that their surroundings suggest."""

import textwrap

import pytest

from dynamo.ops.clones.rust import rust_sites
from dynamo.ops.clones.sites import Bucket, CloneSite, ranked

PATH = "lib/llm/src/backend.rs"


def sites(body: str, path: str = PATH) -> list[CloneSite]:
    return rust_sites(path, textwrap.dedent(body).encode())


def bucket(statement: str, parameters: str = "") -> Bucket:
    (found,) = sites(f"fn process(&self{parameters}) {{\n{statement}\n}}")
    return found.bucket


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("let a = self.sender.clone();", Bucket.SHARED),
        ("let a = Arc::clone(&self.x);", Bucket.SHARED),
        ("tokio::spawn(async move { run(item.clone()) });", Bucket.ASYNC),
        ("let f = move |x| keep(item.clone());", Bucket.ASYNC),
        ("x.map_err(|e| fail(item.clone()));", Bucket.COLD),
        ('tracing::debug!("{}", item.clone());', Bucket.COLD),
        ('let a = "text".to_string();', Bucket.COLD),
        ("take(&item.name.clone());", Bucket.BORROW),
        ("let a = item.clone(); use_it(a);", Bucket.MOVE),
        ("let a = item.clone(); use_it(a, item);", Bucket.BORROW),
        ("let a = request.token_ids.clone();", Bucket.API),
        ("let a = part.to_vec();", Bucket.MOVE),
        ("let a = self.part.to_vec();", Bucket.API),
        ("let s = stream! { yield item.name.clone(); };", Bucket.BORROW),
        ("let a = v.iter().map(|e| e.clone());", Bucket.BORROW),
    ],
)
def test_bucket_follows_the_surroundings(statement: str, expected: Bucket) -> None:
    assert bucket(statement) is expected


def test_borrowed_parameter_requires_another_signature() -> None:
    assert bucket("let a = name.clone();", ", name: &String") is Bucket.API


def test_comments_and_strings_are_no_sites() -> None:
    assert sites('fn f() { // a.clone()\n let s = "b.clone()"; }') == []


def test_loops_async_functions_and_names_raise_the_score() -> None:
    plain, looped = sites("fn f() { g(a.x.clone(), a); }\nasync fn process() { for b in c { g(b.x.clone(), b); } }")
    assert (plain.is_in_loop, looped.is_in_loop, looped.is_async) == (False, True, True)
    assert ranked([plain, looped]) == [looped, plain]
    assert looped.area == "request path"


@pytest.mark.parametrize(
    ("statement", "is_loop"),
    [
        ("let a = v.iter().filter(|e| e.on).map(|e| e.name.clone());", True),
        ("let a = self.stream.map(|e| e.name.clone());", True),
        ("v.for_each(|e| keep(e.name.clone()));", True),
        ("let a = self.name.as_ref().map(|e| e.text.clone());", False),
        ("let a = v.iter().find(|e| e.on).map(|e| e.name.clone());", False),
        ("let a = v.iter().next().map(|e| e.parts.iter().map(|p| p.name.clone()));", True),
    ],
)
def test_option_is_no_loop(statement: str, is_loop: bool) -> None:
    (found,) = sites(f"fn f() {{ {statement} }}")
    assert found.is_in_loop is is_loop


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("for a in &calls { push(a.id.clone()); }", Bucket.MOVE),
        ("for a in &calls { push(a.id.clone()); } keep(calls)", Bucket.BORROW),
        ("for a in &self.calls { push(a.id.clone()); }", Bucket.BORROW),
        ("for b in c { for a in &calls { push(a.id.clone()); } }", Bucket.BORROW),
    ],
)
def test_loop_over_references_may_consume_what_is_not_used_afterwards(body: str, expected: Bucket) -> None:
    assert bucket(body) is expected


def test_parameter_that_is_a_reference_is_not_consumed() -> None:
    assert bucket("for a in &calls { push(a.id.clone()); }", ", calls: &Vec<Call>") is Bucket.BORROW


def test_request_of_a_retry_is_kept() -> None:
    (found,) = sites("impl RetryManager { fn send(&self) { go(self.request.clone(), self.x) } }")
    assert found.bucket is Bucket.ASYNC


def test_line_is_that_of_the_call_in_a_chain_of_several_lines() -> None:
    (found,) = sites("fn f() {\n  let a = self.params\n    .tools\n    .clone();\n}")
    assert found.line == 4


def test_test_code_is_excluded_unless_requested() -> None:
    found = sites(
        "#[cfg(test)]\nmod tests { fn f() { g(&a.clone()); } }\n#[tokio::test]\nasync fn t() { h(&b.clone()); }"
    )
    assert [one.is_test for one in found] == [True, True]
    assert ranked(found) == []
    assert len(ranked(found, include_tests=True)) == 2
    assert sites("fn f() { g(&a.clone()); }", "lib/x/tests/y.rs")[0].is_test
