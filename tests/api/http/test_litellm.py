"""litellm, unchanged, against a real server. Engine: none (the queue is a fake).

It runs in a process of its own: on import it starts what our other tests rightly call stray.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

import pytest

from tests.api.fake import NAME, FakeBackend

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROGRAM = """
import json, sys
import litellm

options = {"model": f"openai/{sys.argv[2]}", "api_base": sys.argv[1] + "/v1", "api_key": "none", "num_retries": 0}
messages = [{"role": "user", "content": "Hello"}]
whole = litellm.completion(messages=messages, temperature=0.3, max_tokens=50, **options)
stream = litellm.completion(messages=messages, stream=True, **options)
streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
try:
    litellm.completion(messages=messages, temperature=7, **options)
except litellm.BadRequestError as error:
    refused = str(error)
print(json.dumps([whole.choices[0].message.content, streamed, whole.usage.completion_tokens, refused]))
"""


async def test_litellm_chats_streams_and_knows_our_errors(url: str, backend: FakeBackend) -> None:
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # else it asks the internet on import
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, url, NAME, stdout=asyncio.subprocess.PIPE, env=environment
    )
    output, _ = await process.communicate()

    whole, streamed, tokens, refused = json.loads(output.splitlines()[-1])
    assert whole == streamed == "Hello, world!"
    assert tokens > 0
    assert "temperature" in refused
