"""TemplateRenderer: renders chat templates in a child process with limits on memory and time (`core.child_pool`)."""

import hashlib
from collections import OrderedDict
from datetime import datetime
from typing import Any

from jinja2 import Template

from dynamo.core.child_process import serve
from dynamo.core.errors import InvalidArgument
from dynamo.text.chat_template.bounds import FULL, Bounds
from dynamo.text.chat_template.sandbox import environment, rendered

TEMPLATES_MAX = 8  # Number of compiled templates that are cached.
MESSAGE_CHARS_MAX = 500  # A template's message may quote the whole conversation.


class TemplateRenderer:
    """Compiled templates of one child process."""

    def __init__(self) -> None:
        self._now = datetime.min  # noqa: DTZ901 - each job has its own
        self._environment = environment(lambda: self._now)
        self._compiled: OrderedDict[bytes, Template] = OrderedDict()

    def render(self, job: dict[str, Any]) -> str | None:
        """Return the prompt of `source` and `context`; None, where there is no context, for a template that compiles.

        Raise `InvalidArgument` with the reason.
        """
        try:
            template = self._template(job["source"])
            if job["context"] is None:
                return None
            self._now = datetime.fromisoformat(job["now"])
            return rendered(template, {**template.globals, **job["context"]}, Bounds(FULL))
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - any failure of an untrusted template is the template's error
            raise InvalidArgument((str(error) or type(error).__name__)[:MESSAGE_CHARS_MAX]) from None

    def _template(self, source: str) -> Template:
        key = hashlib.sha256(source.encode("utf-8", "replace")).digest()
        template = self._compiled.get(key)
        if template is None:
            template = self._compiled[key] = self._environment.from_string(source)
            if len(self._compiled) > TEMPLATES_MAX:
                self._compiled.popitem(last=False)
        return template


if __name__ == "__main__":
    raise SystemExit(serve(TemplateRenderer().render))
