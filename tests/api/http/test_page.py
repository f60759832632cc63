"""The page in a headless Chromium, over the whole path in real processes. Engine: scripted."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

from harness.stack import Stack


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    stack = Stack(workers=1)
    stack.arguments["worker"] = ("--engine", "scripted", "--script-step-s", "0.02", "--max-context-tokens", "4096")
    with stack:
        yield stack


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    binary = shutil.which("chromium")
    if binary is None:
        if "CI" in os.environ:
            pytest.fail("no chromium on this machine")
        pytest.skip("no chromium on this machine")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=binary, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser, stack: Stack) -> Iterator[Page]:
    """The page, loaded; a test fails when the browser complained or asked another address for anything."""
    complaints: list[str] = []
    page = browser.new_page()
    page.on("console", lambda message: complaints.append(message.text) if is_complaint(message) else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda asked: None if asked.url.startswith(stack.url) else complaints.append(asked.url))
    page.goto(stack.url)
    expect(page.locator("#health")).to_have_text("healthy")
    expect(page.locator("#model")).to_have_value("scripted")
    yield page
    page.close()
    assert complaints == []


def is_complaint(message: ConsoleMessage) -> bool:
    """Errors of the page; that the server refused a request is none."""
    return message.type == "error" and "400 (Bad Request)" not in message.text


def ask(page: Page, text: str, *, max_tokens: int) -> None:
    page.fill("#max-tokens", str(max_tokens))
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def test_page_shows_the_answer_as_it_comes_with_its_speed(page: Page) -> None:
    ask(page, "Hello", max_tokens=60)

    answer = page.locator("#messages li.assistant span")
    expect(answer).not_to_be_empty()
    expect(page.locator("#messages li.assistant small")).to_contain_text("60 tokens")
    expect(page.locator("#messages li.assistant small")).to_contain_text("tokens/s")
    assert len(answer.inner_text()) >= 50


def test_page_stops_an_answer_and_frees_its_row(page: Page) -> None:
    ask(page, "Go on and on", max_tokens=3000)
    expect(page.locator(".rows .busy")).to_have_count(1)

    page.click("#stop")

    expect(page.locator("#messages li.assistant small")).to_contain_text("stopped")
    expect(page.locator(".rows .busy")).to_have_count(0)
    expect(page.locator("#running")).to_have_text("0")
    expect(page.locator("#waiting")).to_have_text("0")


def test_page_shows_the_lane_and_its_rows(page: Page) -> None:
    expect(page.locator(".lane h3")).to_have_text("scripted@000000000000")
    expect(page.locator(".rows span")).to_have_count(8)


def test_page_shows_what_the_server_refuses(page: Page) -> None:
    page.evaluate("document.getElementById('max-tokens').value = 5")
    page.evaluate("document.getElementById('temperature').value = 1.5")
    page.fill("#prompt", "x" * 5000)
    page.press("#prompt", "Enter")

    expect(page.locator("#messages li.assistant small")).to_contain_text("maximum context length")


def test_page_keeps_the_conversation(page: Page) -> None:
    ask(page, "First", max_tokens=5)
    expect(page.locator("#messages li.assistant small")).to_have_count(1)
    expect(page.locator("#send")).to_be_enabled()
    ask(page, "Second", max_tokens=5)

    expect(page.locator("#messages li")).to_have_count(4)
    expect(page.locator("#messages li.user span").nth(1)).to_have_text("Second")


def test_description_page_lists_the_paths(page: Page, stack: Stack) -> None:
    page.goto(f"{stack.url}/docs")

    expect(page.locator("article h2").first).to_contain_text("/v1/chat/completions")
