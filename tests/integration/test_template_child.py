"""Chat templates that need more than the serving process allows, rendered in a child process."""

from datetime import UTC, datetime

import pytest
from tests.unit.text.chat_template.test_sandbox import EXCESSIVE

from dynamo.core.errors import ConfigError, InvalidArgument
from dynamo.protocols.openai import ChatMessage
from dynamo.text.chat_template.bounds import QUICK, OverBudget
from dynamo.text.chat_template.template import ChatTemplate

USER = [ChatMessage(role="user", content="x" * 100)]
SQUARES = "{% set ns = namespace(x=messages[0].content | length) %}{% for a in range(99999) %}{% set ns.x = ns.x ** 9 %}{% endfor %}"
INDENT = "{% for m in messages %}{{ m.content | indent(2) }}{{ '%s' % m.role }}{% endfor %}"


def test_template_with_unlisted_filter_is_rendered_in_child() -> None:
    template = ChatTemplate({"default": INDENT})
    assert template.render(USER) == "x" * 100 + "user"
    with pytest.raises(OverBudget):
        template.render(USER, budget=QUICK)


def test_template_in_child_has_its_tokens_arguments_and_clock() -> None:
    source = "{{ bos_token }}{{ strftime_now('%Y') }}{{ flag }}{{ '%s' % tools[0].a }}{{ messages | length }}"
    template = ChatTemplate({"default": source}, {"bos_token": "<s>"}, now=lambda: datetime(2031, 1, 2, tzinfo=UTC))
    assert template.render(USER, tools=[{"a": 1}], arguments={"flag": True}) == "<s>2031True11"


def test_failures_in_child_are_refused_as_in_this_process() -> None:
    template = ChatTemplate({"default": "{{ '%s' % 1 }}{{ raise_exception('Roles must alternate') }}"})
    with pytest.raises(InvalidArgument, match=r"^chat template: Roles must alternate$") as refused:
        template.render(USER)
    assert refused.value.param == "messages"


@pytest.mark.parametrize("source", [*EXCESSIVE[2:14], SQUARES])
def test_excessive_template_is_refused(source: str) -> None:
    template = ChatTemplate({"default": "{% if messages[0].content | length > 50 %}" + source + "{% endif %}"})
    with pytest.raises(InvalidArgument, match="chat template: ") as refused:
        template.render(USER)
    assert refused.value.param == "messages"


def test_large_template_is_compiled_and_rendered_in_child() -> None:
    source = "{# " + "x" * 70_000 + " #}{{ messages[0].role }}"
    assert ChatTemplate({"default": source}).render(USER) == "user"
    with pytest.raises(ConfigError, match="chat template: "):
        ChatTemplate({"default": source + "{% if %}"})
    with pytest.raises(ConfigError, match="1048577 characters; at most 1048576"):
        ChatTemplate({"default": "x" * ((1 << 20) + 1)})


@pytest.mark.parametrize(
    "source", ["{% for a in b %}" * 40 + "{% endfor %}" * 40, "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "{{ x"]
)
def test_template_that_cannot_be_compiled_is_a_configuration_error(source: str) -> None:
    with pytest.raises(ConfigError, match="chat template: "):
        ChatTemplate({"default": source})
