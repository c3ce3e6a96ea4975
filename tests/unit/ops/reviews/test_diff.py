"""Unified diffs: added lines with their numbers and surroundings."""

import pytest

from dynamo.core.errors import ConfigError
from dynamo.ops.reviews.diff import added_lines, changed_paths

DIFF = """\
diff --git a/a.py b/a.py
--- a/a.py
+++ b/a.py
@@ -10,3 +10,5 @@ async def f():
     x = 1
-    y = 2
+    for z in y:
+        g(z)
+++ i
     w = 3
diff --git a/gone b/gone
--- a/gone
+++ /dev/null
@@ -1 +0,0 @@
-x
"""


def test_added_lines_have_numbers_and_enclosing_lines() -> None:
    found = added_lines(DIFF)
    assert [(one.path, one.number, one.text) for one in found] == [
        ("a.py", 11, "    for z in y:"),
        ("a.py", 12, "        g(z)"),
        ("a.py", 13, "++ i"),
    ]
    assert list(found[1].enclosing) == ["for z in y:", "async def f():"]
    assert changed_paths(DIFF) == ["a.py"]


def test_text_that_is_not_a_diff_is_refused() -> None:
    assert added_lines("") == []
    with pytest.raises(ConfigError, match="not a unified diff"):
        added_lines("hello\n")
