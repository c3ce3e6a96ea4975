"""Copies in Python, by their buckets."""

import pytest

from dynamo.ops.clones.python import python_sites
from dynamo.ops.clones.sites import Bucket


@pytest.mark.parametrize(
    ("statement", "bucket"),
    [
        ("x = list(y)", Bucket.BORROW),
        ("x = dict(y)", Bucket.BORROW),
        ("x = y.copy()", Bucket.BORROW),
        ("x = copy.deepcopy(y)", Bucket.API),
        ("x = dataclasses.replace(y, a=1)", Bucket.API),
        ("x = list(f(y))", Bucket.COLD),
        ("x = list([a for a in y])", Bucket.MOVE),
        ("raise E(list(y))", Bucket.COLD),
        ("for a in list(self.y): pass", Bucket.ASYNC),
    ],
)
def test_bucket_follows_the_call(statement: str, bucket: Bucket) -> None:
    (found,) = python_sites("src/dynamo/serving/x.py", f"def f():\n    {statement}\n".encode())
    assert found.bucket is bucket


def test_copy_in_a_loop_is_hot_and_the_source_of_the_loop_is_not() -> None:
    inner, outer = python_sites(
        "a.py", b"def f():\n    for a in b:\n        g(list(a))\n    for c in list(d):\n        pass\n"
    )
    assert (inner.is_in_loop, outer.is_in_loop) == (True, False)


def test_other_calls_and_invalid_files_are_no_clone_sites() -> None:
    assert python_sites("a.py", b"def f(): return dict(a=1), x.copy(y), str(z)\n") == []
    assert python_sites("a.py", b"def f(:") == []
