"""Fields that ask for nothing are taken, and those that would change the answer refused by name. Engine: none."""

from __future__ import annotations

import datetime
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI
from openai.types import completion_create_params as text_params
from openai.types.chat import ChatCompletionUserMessageParam
from openai.types.chat import completion_create_params as chat_params

from api.openai.schemas import DEFAULTS, ChatRequest, CompletionRequest, Message
from api.text.chat_template import ChatTemplate
from api.text.conversation import render
from api.text.detokenizer import TokenizerText
from api.text.tokenizers import Bundle
from tests.api.fake import NAME, FakeBackend, Script, tokenizer_files
from tests.api.http.test_refusals import CHAT, CHAT_BODY, TEXT, TEXT_BODY, error_of

pytestmark = pytest.mark.asyncio(loop_scope="session")

BODIES = {CHAT: CHAT_BODY, TEXT: TEXT_BODY}
paths = pytest.mark.parametrize("path", [CHAT, TEXT])
REQUIRED = {"model", "messages", "prompt"}
SDK_FIELDS = {
    CHAT: set(chat_params.CompletionCreateParamsBase.__annotations__) - REQUIRED,
    TEXT: set(text_params.CompletionCreateParamsBase.__annotations__) - REQUIRED,
}
LABELS: list[dict[str, Any]] = [
    {"user": "u", "metadata": {"a": "b"}, "safety_identifier": "s", "prompt_cache_key": "k"},
    {"prompt_cache_retention": "24h", "prompt_cache_options": {"mode": "explicit", "more": None}},
    {"service_tier": "auto", "store": False},
    {"service_tier": "default"},
    {"verbosity": "high"},
    {"stream_options": None},
    {"stream_options": {"include_usage": False, "continuous_usage_stats": False, "include_obfuscation": False}},
    {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": False}},
    {"top_k": -1, "n": 1, "stop": [], "logit_bias": {}},
]


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": None, "stop": None, "tools": None, "stream": None, "n": None, "user": None},
        {"response_format": {"type": "text"}},
        {"reasoning_effort": "low"},
        {"web_search_options": None},
        {"parallel_tool_calls": False},
        {"parallel_tool_calls": True},
        {"user": "u", "metadata": {"a": "b"}, "safety_identifier": "s", "prompt_cache_key": "k"},
        {"service_tier": "auto", "store": False},
        {"tools": [], "tool_choice": "none", "modalities": ["text"]},
        {"n": 1, "max_tokens": 3, "max_completion_tokens": 3},
        {"stream_options": None},
        {"top_k": -1},
    ],
    ids=str,
)
async def test_chat_takes_fields_that_ask_for_nothing(http: httpx.AsyncClient, change: dict[str, Any]) -> None:
    response = await http.post(CHAT, json={**CHAT_BODY, **change})

    assert response.status_code == 200, response.text


@paths
@pytest.mark.parametrize("change", LABELS, ids=str)
async def test_labels_and_defaults_are_taken(http: httpx.AsyncClient, path: str, change: dict[str, Any]) -> None:
    response = await http.post(path, json={**BODIES[path], **change})

    assert response.status_code == 200, response.text


@paths
@pytest.mark.parametrize("name", DEFAULTS)
async def test_field_may_have_its_default_and_nothing_else(http: httpx.AsyncClient, path: str, name: str) -> None:
    default = DEFAULTS[name]
    other = not default if isinstance(default, bool) else 2
    if name not in (ChatRequest if path == CHAT else CompletionRequest).__struct_fields__:
        return

    taken = await http.post(path, json={**BODIES[path], name: default})
    refused = await http.post(path, json={**BODIES[path], name: other})

    assert taken.status_code == 200, taken.text
    assert refused.status_code == 400
    assert (error_of(refused)["param"], error_of(refused)["code"]) == (name, "unsupported_parameter")


@paths
async def test_null_is_taken_for_every_field_there_is(http: httpx.AsyncClient, path: str) -> None:
    known = set((ChatRequest if path == CHAT else CompletionRequest).__struct_fields__) - REQUIRED
    names = known | SDK_FIELDS[path] | {"a_field_of_tomorrow", "guided_json", "cache_salt"}

    response = await http.post(path, json={**BODIES[path], **dict.fromkeys(names)})

    assert response.status_code == 200, response.text


async def test_null_is_taken_within_messages_parts_and_options(http: httpx.AsyncClient) -> None:
    part = {"type": "text", "text": "Hello", "cache_control": None, "annotations": None}
    messages = [{"role": "user", "content": [part], "name": None, "mood": None, "audio": None}]

    response = await http.post(CHAT, json={**CHAT_BODY, "messages": messages, "stream_options": {"later": None}})

    assert response.status_code == 200, response.text


async def test_null_that_means_something_is_kept(http: httpx.AsyncClient, backend: FakeBackend) -> None:
    body = {**CHAT_BODY, "chat_template_kwargs": {"thinking": None}, "unknown": None, "seed": 2**63 - 1}

    response = await http.post(CHAT, json=body)

    assert response.status_code == 200, response.text
    assert backend.submitted[0][2] == 2**63 - 1


@paths
@pytest.mark.parametrize("change", [{"unknown": False}, {"unknown": [None]}, {"unknown": 0, "other": None}], ids=str)
async def test_unknown_field_with_a_value_is_still_refused(
    http: httpx.AsyncClient, path: str, change: dict[str, Any]
) -> None:
    response = await http.post(path, json={**BODIES[path], **change})

    assert response.status_code == 400
    assert error_of(response)["param"] == "unknown"


@pytest.mark.parametrize(
    "rest",
    [b"", b'"model": NaN}', b'"a": ' + b"[" * 100_000, b'"a": "\xff"}', b'"a": "\\ud800"}'],
    ids=lambda rest: repr(rest[:9]),
)
async def test_body_that_goes_wrong_behind_an_unknown_null_is_400(http: httpx.AsyncClient, rest: bytes) -> None:
    data = b'{"unknown": null, ' + rest

    response = await http.post(CHAT, content=data, headers={"content-type": "application/json"})

    assert response.status_code == 400
    error_of(response)


@pytest.mark.parametrize(
    ("path", "change", "param"),
    [
        (CHAT, {"web_search_options": {}}, "web_search_options"),
        (CHAT, {"moderation": {"model": "m"}}, "moderation"),
        (CHAT, {"stream": True, "stream_options": {"continuous_usage_stats": True}}, None),
        (TEXT, {"stream": True, "stream_options": {"include_obfuscation": True}}, None),
        (TEXT, {"suffix": "x"}, "suffix"),
    ],
)
async def test_field_that_would_change_the_answer_is_refused_by_name(
    http: httpx.AsyncClient, path: str, change: dict[str, Any], param: str | None
) -> None:
    response = await http.post(path, json={**BODIES[path], **change})

    assert response.status_code == 400
    assert error_of(response)["code"] == "unsupported_parameter"
    assert error_of(response)["param"] == (param or f"stream_options.{[*change['stream_options']][0]}")


async def test_empty_suffix_is_taken(http: httpx.AsyncClient) -> None:
    assert (await http.post(TEXT, json={**TEXT_BODY, "suffix": ""})).status_code == 200


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"reasoning_effort": "low"}, "low"),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "x"}}, "x"),
    ],
)
async def test_reasoning_effort_reaches_a_template_that_knows_it(fields: dict[str, Any], expected: str) -> None:
    template = ChatTemplate("{{ reasoning_effort }}", {}, clock=datetime.datetime.now)
    body = ChatRequest(model=NAME, messages=[Message("user", "Hello")], **fields)

    prompt = await render(body, Bundle(TokenizerText(tokenizer_files()["tokenizer.json"]), template))

    assert prompt.text == expected


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
async def test_answer_is_taken_back_as_the_client_dumps_it(
    openai: AsyncOpenAI, http: httpx.AsyncClient, is_streamed: bool
) -> None:
    question: ChatCompletionUserMessageParam = {"role": "user", "content": "Hello"}
    if is_streamed:
        stream = await openai.chat.completions.create(model=NAME, messages=[question], stream=True)
        deltas = [chunk.choices[0].delta async for chunk in stream]
        answer = {**deltas[0].model_dump(), "content": "".join(delta.content or "" for delta in deltas)}
    else:
        whole = await openai.chat.completions.create(model=NAME, messages=[question])
        answer = whole.choices[0].message.model_dump()
    others: dict[str, Any] = {
        "reasoning": None,
        "reasoning_content": None,
        "parsed": None,
        "tool_calls": [],
        "annotations": [],
    }
    assert None in answer.values()

    for said in (answer, {**answer, **others}):
        response = await http.post(CHAT, json={**CHAT_BODY, "messages": [question, said, question]})
        assert response.status_code == 200, response.text


async def test_completion_is_taken_back_as_the_next_prompt(openai: AsyncOpenAI, backend: FakeBackend) -> None:
    backend.script = lambda _: Script(text="a\u2028漢")
    answer = (await openai.completions.create(model=NAME, prompt="x", logprobs=1)).choices[0].model_dump()

    again = await openai.completions.create(model=NAME, prompt=answer["text"])

    assert again.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    "name",
    [
        "self",
        "messages",
        "tokenize",
        "pad_token",
        "unk_token",
        "raise_exception",
        "range",
        "loop",
        "add_generation_prompt",
    ]
    + ["a b", "", "1a", "a-b", "if", "None", "a.b", "*"],
)
async def test_variable_that_a_template_must_not_be_given_is_named(http: httpx.AsyncClient, name: str) -> None:
    response = await http.post(CHAT, json={**CHAT_BODY, "chat_template_kwargs": {name: 1}})

    assert response.status_code == 400
    assert (error_of(response)["param"], repr(name) in error_of(response)["message"]) == ("chat_template_kwargs", True)
    assert "Error" not in error_of(response)["message"]


@pytest.mark.parametrize(
    "name", ["enable_thinking", "thinking", "größe", "cls", "template", "args", "source", "environment"]
)
async def test_other_variables_are_taken(http: httpx.AsyncClient, name: str) -> None:
    response = await http.post(CHAT, json={**CHAT_BODY, "chat_template_kwargs": {name: True}})

    assert response.status_code == 200, response.text
