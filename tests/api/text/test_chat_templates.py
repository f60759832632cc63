"""Chat templates as their authors wrote them. Engine: none."""

from __future__ import annotations

import datetime
import json

import pytest

from api.text.chat_template import ChatTemplate, TemplateError, load_template

MESSAGES = [{"role": "user", "content": "a < b"}]


def clock() -> datetime.datetime:
    return datetime.datetime(2026, 1, 2)


def template(source: str, **special: str) -> ChatTemplate:
    return ChatTemplate(source, special, clock=clock)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        pytest.param("{{ messages[0].content }}", "a < b", id="nothing is escaped"),
        pytest.param("{{ messages[0] | tojson }}", '{"role": "user", "content": "a < b"}', id="tojson"),
        pytest.param("{{ {'b': 1, 'a': [2]} | tojson(indent=1) }}", '{\n "b": 1,\n "a": [\n  2\n ]\n}', id="indent"),
        pytest.param("{% if true %}\n  x\n{% endif %}\ny", "  x\ny", id="blocks are trimmed"),
        pytest.param("  {%- if true %}\nx{% endif %}", "x", id="blank before a block"),
        pytest.param("{{ strftime_now('%d %b %Y') }}", "02 Jan 2026", id="the date"),
        pytest.param("{{ bos_token }}{{ add_generation_prompt }}", "<s>True", id="special tokens"),
        pytest.param("{% for i in [1,2,3] %}{% if i==2 %}{% break %}{% endif %}{{i}}{% endfor %}", "1", id="break"),
        pytest.param("{% generation %}x{% endgeneration %}", "x", id="generation marks"),
        pytest.param("{% set ns = namespace(n=0) %}{% set ns.n = 3 %}{{ ns.n }}", "3", id="namespace"),
        pytest.param("{% if tools %}t{% else %}none{% endif %}", "none", id="no tools"),
    ],
)
def test_template_renders_as_its_author_expects(source: str, expected: str) -> None:
    assert template(source, bos_token="<s>").render(MESSAGES) == expected


@pytest.mark.parametrize(
    ("source", "words"),
    [
        pytest.param("{{ raise_exception('roles must alternate') }}", "roles must alternate", id="raised"),
        pytest.param("{{ messages[0].content + 1 }}", "TypeError", id="wrong types"),
        pytest.param("{{ messages[9].content.x }}", "undefined|no element", id="undefined"),
        pytest.param("{{ 1 / 0 }}", "ZeroDivisionError", id="arithmetic"),
        pytest.param("{{ ''.__class__.__mro__ }}", "unsafe", id="out of the sandbox"),
        pytest.param("{% set _ = messages.append(1) %}", "unsafe|immutable|not safely", id="changing its input"),
        pytest.param("{{ range(10000000) | list }}", "OverflowError|Range too big", id="too long a loop"),
    ],
)
def test_template_error_names_what_went_wrong(source: str, words: str) -> None:
    with pytest.raises(TemplateError, match=words):
        template(source).render(MESSAGES)


def test_template_that_cannot_be_read_is_an_error() -> None:
    with pytest.raises(TemplateError, match="cannot be read"):
        template("{% if %}")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param({}, None, id="none"),
        pytest.param({"chat_template.jinja": "file"}, "file", id="own file"),
        pytest.param({"tokenizer_config.json": {"chat_template": "config"}}, "config", id="in the config"),
        pytest.param(
            {"chat_template.jinja": "file", "tokenizer_config.json": {"chat_template": "c"}}, "file", id="both"
        ),
        pytest.param(
            {
                "tokenizer_config.json": {
                    "chat_template": [
                        {"name": "tool_use", "template": "t"},
                        {"name": "default", "template": "d"},
                    ]
                }
            },
            "d",
            id="named ones",
        ),
        pytest.param(
            {
                "tokenizer_config.json": {
                    "chat_template": "{{ bos_token }}{{ eos_token }}",
                    "bos_token": {"content": "<s>"},
                    "eos_token": "</s>",
                }
            },
            "<s></s>",
            id="special tokens as objects",
        ),
    ],
)
def test_template_is_found_among_the_files(files: dict[str, object], expected: str | None) -> None:
    raw = {
        name: content.encode() if isinstance(content, str) else json.dumps(content).encode()
        for name, content in files.items()
    }

    found = load_template(raw, clock=clock)

    assert (None if found is None else found.render(MESSAGES)) == expected


def test_template_in_a_broken_config_is_an_error() -> None:
    with pytest.raises(TemplateError, match=r"tokenizer_config\.json"):
        load_template({"tokenizer_config.json": b"{"}, clock=clock)
