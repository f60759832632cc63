"""Chat templates: messages in, the prompt's text out, rendered as the model's authors wrote it down.

Templates come from model files and are rendered in jinja2's sandbox with the names that Hugging Face templates
expect. Knows nothing of HTTP bodies.
"""

from __future__ import annotations

import datetime
import json
import keyword
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.defaults
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import msgspec
from jinja2.sandbox import ImmutableSandboxedEnvironment

Clock = Callable[[], datetime.datetime]

RESERVED = frozenset(
    {
        *("messages", "tools", "documents", "add_generation_prompt"),
        *("bos_token", "eos_token", "pad_token", "unk_token"),
        *("raise_exception", "strftime_now", *jinja2.defaults.DEFAULT_NAMESPACE),
        *("self", "super", "loop", "caller", "varargs", "kwargs"),
        *("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"),
        *("chat_template", "conversation", "continue_final_message", "return_assistant_tokens_mask"),
    }
)
"""Names that a template has from us or from jinja2, and parameters of the function that renders templates elsewhere: a
request must not set them."""


def is_variable(name: str) -> bool:
    """Whether a request may set this variable of a template."""
    return name.isidentifier() and not keyword.iskeyword(name) and name not in RESERVED


class TemplateError(Exception):
    """The template cannot be read, or does not take these messages."""


class _TokenizerConfig(msgspec.Struct):
    chat_template: str | list[dict[str, str]] | None = None
    bos_token: str | dict[str, Any] | None = None
    eos_token: str | dict[str, Any] | None = None
    pad_token: str | dict[str, Any] | None = None
    unk_token: str | dict[str, Any] | None = None


class ChatTemplate:
    """One model's template with the special tokens it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, clock: Clock) -> None:
        """Raises: TemplateError when the template cannot be read."""
        try:
            self._template = _environment(clock).from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateError(f"the model's chat template cannot be read: {error}") from error
        self.source = source
        self._special_tokens = dict(special_tokens)
        self.names_developer = "developer" in source

    def render(self, messages: Sequence[Mapping[str, Any]], extra: Mapping[str, Any] = {}) -> str:
        """The prompt, open for the assistant's answer.

        Raises:
            TemplateError: the template refuses these messages.
        """
        try:
            own = {"messages": list(messages), "tools": None, "add_generation_prompt": True}
            return self._template.render({**extra, **self._special_tokens, **own})
        except jinja2.TemplateError as error:
            raise TemplateError(error.message or type(error).__name__) from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            # A template that meets something its author did not think of fails like any Python code.
            raise TemplateError(f"{type(error).__name__}: {error}") from error


def load_template(files: Mapping[str, bytes], *, clock: Clock = datetime.datetime.now) -> ChatTemplate | None:
    """The chat template among a model's tokenizer files; None when it has none.

    Raises:
        TemplateError: there is one, and it cannot be read.
    """
    try:
        config = msgspec.json.decode(files.get("tokenizer_config.json", b"{}"), type=_TokenizerConfig)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise TemplateError(f"tokenizer_config.json cannot be read: {error}") from error
    source = _source(files, config)
    return None if source is None else ChatTemplate(source, _special_tokens(config), clock=clock)


def _source(files: Mapping[str, bytes], config: _TokenizerConfig) -> str | None:
    if (own_file := files.get("chat_template.jinja")) is not None:
        return own_file.decode("utf-8", "replace")
    match config.chat_template:
        case [*named]:
            by_name = {entry.get("name", ""): entry.get("template", "") for entry in named}
            return by_name.get("default")
        case source:
            return source


def _special_tokens(config: _TokenizerConfig) -> dict[str, str]:
    named = {
        "bos_token": config.bos_token,
        "eos_token": config.eos_token,
        "pad_token": config.pad_token,
        "unk_token": config.unk_token,
    }
    contents = {name: token.get("content") if isinstance(token, dict) else token for name, token in named.items()}
    return {name: content for name, content in contents.items() if isinstance(content, str)}


def _environment(clock: Clock) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: clock().strftime(form)
    return environment


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what a model wrote, for training; for serving only its body counts."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,  # positional, as templates call it
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML, which no prompt wants."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
