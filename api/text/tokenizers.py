"""The text tools of each model, loaded once per tokenizer hash from the files the workers stored."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from api.errors import ApiError, BusyError
from api.text.chat_template import ChatTemplate, TemplateError, load_template
from api.text.detokenizer import TokenizerText
from broker.errors import WireError

KEPT = 8

FetchFiles = Callable[[str], Awaitable[dict[str, bytes]]]


@dataclass(frozen=True, slots=True)
class Bundle:
    """Tokenizer and chat template of one model."""

    text: TokenizerText
    template: ChatTemplate | None


class Bundles:
    """Keeps the bundles used last; a bundle in the making is made once, however many wait for it."""

    def __init__(self, fetch: FetchFiles) -> None:
        self._fetch = fetch
        self._made: OrderedDict[str, asyncio.Task[Bundle]] = OrderedDict()

    async def get(self, digest: str) -> Bundle:
        """Raises: ApiError, BrokerUnavailableError."""
        task = self._made.get(digest)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = asyncio.create_task(self._make(digest), name="tokenizer-bundle")
            self._made[digest] = task
        self._made.move_to_end(digest)
        while len(self._made) > KEPT:
            self._made.popitem(last=False)
        return await asyncio.shield(task)  # a caller that leaves must not take it away from the others

    async def _make(self, digest: str) -> Bundle:
        files = await self._fetch(digest)
        if "tokenizer.json" not in files:
            raise BusyError("The tokenizer of this model is not stored at the moment.", code="tokenizer_missing")
        try:
            return await asyncio.to_thread(load_bundle, files)
        except (WireError, TemplateError) as error:
            raise ApiError(f"This model's tokenizer cannot be used: {error}", code="tokenizer_unusable") from error


def load_bundle(files: Mapping[str, bytes]) -> Bundle:
    """Raises: WireError, TemplateError."""
    return Bundle(TokenizerText(files["tokenizer.json"]), load_template(files))
