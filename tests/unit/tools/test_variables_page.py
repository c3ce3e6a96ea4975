"""docs/reference/variables.md contains the variables of flags and those that modules read."""

from tools import variables_page

from dynamo.core.known_variables import KNOWN


def test_every_known_variable_is_in_the_page() -> None:
    text = variables_page.content()
    assert [name for name in KNOWN if f"`{name}`" not in text] == []


def test_settings_have_their_default_and_module() -> None:
    assert variables_page.settings()["DYN_DISABLE_FRONTEND_NVEXT"] == ("off", "`serving/pipeline`")
