"""What a decode node generates, in the shapes of OpenAI's API. Pure."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from kvferry.router.api import CHAT
from kvferry.router.sse import DONE
from transfer.pb import kvferry_pb2 as pb


class Shapes:
    """The answer to one request.

    Args:
        path: Of the endpoint.
        model: Name of the model.
        request_id: Of the request.
    """

    def __init__(self, path: str, model: str, request_id: str) -> None:
        self._is_chat = path == CHAT
        self._model = model
        self._id = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{request_id}"
        self._created = int(time.time())

    def whole(self, text: str, done: pb.GenerateDone) -> bytes:
        """All at once."""
        said: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if self._is_chat else {"text": text}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": done.finish_reason}
        return json.dumps(self._object("", [choice]) | {"usage": _usage(done)}).encode()

    def beginning(self) -> bytes:
        """What comes before the first text of a stream: of a chat, who speaks."""
        return self._event({"role": "assistant", "content": ""}) if self._is_chat else b""

    def some(self, text: str) -> bytes:
        """More text of a stream."""
        return self._event({"content": text} if self._is_chat else text)

    def end(self, done: pb.GenerateDone, *, with_usage: bool) -> bytes:
        """The end of a stream."""
        last = self._event({} if self._is_chat else "", done.finish_reason)
        usage = _sse(self._object(".chunk", []) | {"usage": _usage(done)}) if with_usage else b""
        return last + usage + b"data: " + DONE + b"\n\n"

    def _event(self, said: Mapping[str, str] | str, finish_reason: str | None = None) -> bytes:
        key = "delta" if self._is_chat else "text"
        return _sse(self._object(".chunk", [{"index": 0, key: said, "logprobs": None, "finish_reason": finish_reason}]))

    def _object(self, suffix: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = f"chat.completion{suffix}" if self._is_chat else "text_completion"
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model, "choices": choices}


def _usage(done: pb.GenerateDone) -> dict[str, int]:
    return {
        "prompt_tokens": done.prompt_tokens,
        "completion_tokens": done.generated_tokens,
        "total_tokens": done.prompt_tokens + done.generated_tokens,
    }


def _sse(content: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"
