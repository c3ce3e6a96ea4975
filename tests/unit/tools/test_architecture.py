"""docs/reference/modules.md is generated and current."""

from tools import architecture


def test_module_page_equals_modules_captions() -> None:
    assert architecture.PAGE.read_text(encoding="utf-8") == architecture.HEAD + architecture.layers(), (
        "run: make format"
    )
