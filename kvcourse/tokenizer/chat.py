"""A conversation as text: the chat template that comes with a model, run in a sandbox."""

import json
from datetime import datetime

import jinja2
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment


def render(template: str, named: dict[str, str], **variables) -> str:
    """The template's text. It comes from a downloaded file, so it runs in Jinja's sandbox, with the few functions that
    templates expect (those of transformers/utils/chat_template_utils.py).

    Raises `ValueError` when the template is broken or refuses the conversation.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    try:
        return environment.from_string(template).render(tools=None, documents=None, **named, **variables)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"The model's chat template is broken in line {error.lineno}: {error.message}") from error
    except jinja2.TemplateError as error:
        raise ValueError(f"The model's chat template does not accept these messages: {error}") from error
    except Exception as error:  # a template can fail in as many ways as a program
        raise ValueError(f"The model's chat template fails with {type(error).__name__}: {error}") from error


class Generation(Extension):
    """`{% generation %}` ... `{% endgeneration %}` marks the assistant's own words for training; the text is the same.

    As in transformers, what is set inside stays inside."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def refuse(message):
    """Templates call it, as `raise_exception`, to reject a conversation."""
    raise jinja2.TemplateError(message)


def check_messages(messages) -> None:
    good = isinstance(messages, (list, tuple)) and all(isinstance(message, dict) for message in messages)
    good = good and all({"role", "content"} <= message.keys() for message in messages)
    if not good or not messages or not all(isinstance(text, str) for m in messages for text in m.values()):
        raise ValueError(
            'messages must be a list with at least one {"role": "user", "content": "..."} in it, all strings; '
            f"got {repr(messages)[:200]}."
        )
