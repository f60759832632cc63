"""`mtplx dead` on a poison request's letter. Engine: scripted, killed by the poison, in processes of their own."""

from __future__ import annotations

import json
import subprocess

import pytest
from openai import APIStatusError, OpenAI

from console.supervisor import mtplx_command
from harness.stack import Stack, clean_environment, connection
from workers.scripted_lane import NAME


def dead(stack: Stack, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*mtplx_command("dead"), *words, "--redis", stack.redis_url],
        capture_output=True,
        text=True,
        env=clean_environment(),
        timeout=60,
    )


def test_request_that_was_given_up_on_is_listed_shown_tried_again_and_dropped() -> None:
    stack = Stack(workers=1)
    stack.arguments["worker"] = ("--engine", "scripted", "--script-crash-text", "poison", "--lease-s", "2")
    stack.arguments["former"] = ("--lease-s", "2", "--max-crashes", "1")
    with stack, OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as openai:
        with pytest.raises(APIStatusError, match="given up"):
            openai.completions.create(model=NAME, prompt="poison", max_tokens=4)
        [letter] = json.loads(dead(stack, "list", "--json").stdout)

        shown = json.loads(dead(stack, "show", letter["request"]).stdout)
        requeued = dead(stack, "requeue", letter["letter"])
        left = json.loads(dead(stack, "list", "--json").stdout)
        unknown = dead(stack, "drop", letter["letter"])

        assert (letter["why"], shown["model"].partition("@")[0], shown["max_tokens"]) == ("crashes", NAME, 4)
        assert requeued.stdout.startswith("again-")
        assert left == []
        assert unknown.returncode == 1
        assert letter["letter"] in unknown.stderr
        with connection(stack.redis_url) as redis:
            assert redis.xlen("{mtplx}:wait:offline") == 1
