"""Known variables: the list equals the variables that the source reads."""

from tools.known_variables import PAGE, names_in, page


def test_known_variables_page_equals_the_tool_output() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == page(text), "run tools/known_variables.py (make format does)"


def test_variable_names_are_literals_or_composed_of_a_prefix() -> None:
    source = '''
"""Prose about DYN_NOT_READ."""
def read(name): return get(f"DYN_FAMILY_{name}")
read("MEMBER"); get("DYN_LITERAL"); get("lower")
'''
    assert set(names_in(source)) == {"DYN_LITERAL", "DYN_FAMILY_MEMBER"}
