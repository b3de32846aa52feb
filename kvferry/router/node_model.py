"""The model of kvferry's decode nodes: its name, its chat template, and requests for it."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kvferry.router import node_body
from kvferry.router.api import CHAT, Answer, ApiError
from kvferry.router.body_reader import BodyReader, is_light
from kvferry.router.node_body import NodeBody
from kvferry.router.settings import RouterSettings
from transfer.errors import ConfigError

DEFAULT_MODEL_NAME: Final = "kvferry"


class NodeModel:
    """See the module's docstring.

    Raises:
        ConfigError: The tokenizer cannot be used.
    """

    def __init__(self, settings: RouterSettings) -> None:
        directory = settings.tokenizer
        self.name = settings.model_name or (directory.resolve().name if directory is not None else "") or DEFAULT_MODEL_NAME
        self._template = ChatTemplate(directory) if directory is not None else None
        self._created = int(time.time())
        self._reader = BodyReader()

    def listed(self) -> Answer:
        """Return the answer to `/v1/models`."""
        card = {"id": self.name, "object": "model", "created": self._created, "owned_by": "kvferry"}
        return Answer(content=json.dumps({"object": "list", "data": [card]}).encode())

    async def read(self, path: str, content: bytes) -> NodeBody:
        """Return the request for a decode node. Raises ApiError if a decode node does not support it."""
        if path != CHAT:
            return await self._reader.read(content, node_body.completion, self.name)
        check = node_body.check if is_light(content) else node_body.check_costly_chat
        body = await self._reader.read(content, check, path, self.name)
        if self._template is None:
            raise ApiError(
                400,
                "chats need a chat template, and this router was started without one (kvferry route --tokenizer DIR); "
                "send the whole prompt to /v1/completions",
            )
        return node_body.node_body(path, body, await self._template.token_ids(body))


class ChatTemplate:
    """A tokenizer with its chat template. Loading takes seconds.

    Raises:
        ConfigError: The tokenizer or its template is missing or cannot be loaded.
    """

    def __init__(self, directory: Path) -> None:
        if not os.path.isdir(directory):  # Path.is_dir raises OSError for a name that is too long
            raise ConfigError(f"--tokenizer is {directory}; it must be a Hugging Face directory with a tokenizer")
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
        except Exception as error:  # the library raises errors of any type
            reason = " ".join(str(error).split())[:300]
            raise ConfigError(f"--tokenizer is {directory}; no tokenizer can be loaded from it: {reason}") from error
        if not getattr(self._tokenizer, "chat_template", None):
            raise ConfigError(f"--tokenizer is {directory}; its tokenizer has no chat template")
        self._own_arguments = frozenset(inspect.signature(self._tokenizer.apply_chat_template).parameters)

    async def token_ids(self, body: Mapping[str, Any]) -> list[int]:
        """Return the prompt of a chat, including the beginning of the assistant's answer.

        Raises:
            ApiError: The messages do not fit the template.
        """
        messages = _checked(body.get("messages"))
        extra = body.get("chat_template_kwargs") or {}
        if not isinstance(extra, dict):
            raise ApiError(400, "chat_template_kwargs must be an object", param="chat_template_kwargs")
        for name in extra:
            if name in self._own_arguments:
                raise ApiError(400, f"chat_template_kwargs has {name}, which is not for clients", param="chat_template_kwargs")
        return await asyncio.to_thread(self._render, messages, extra)

    def _render(self, messages: list[dict[str, Any]], extra: Mapping[str, Any]) -> list[int]:
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **extra)
        except Exception as error:  # templates raise errors of any type, for an unknown role, for example
            reason = " ".join(str(error).split())[:300]
            raise ApiError(400, f"messages do not fit the model's chat template: {reason}", param="messages") from error
        # The template has written the special tokens already.
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


def _checked(messages: object) -> list[dict[str, Any]]:
    """Return the messages, each with its content as one text."""
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "messages is missing or empty; it must be a list of messages", param="messages")
    checked = []
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ApiError(400, f"messages[{index}] must be an object with a role", param="messages")
        checked.append({**message, "content": _text(message.get("content"), index)})
    return checked


def _text(content: object, index: int) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else None
    if parts is None or not all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in parts
    ):
        raise ApiError(400, f"messages[{index}].content must be text, or a list of parts of type text", param="messages")
    return "".join(part["text"] for part in parts)
