"""Messages of a chat as the token ids of a prompt, by the chat template of a Hugging Face directory."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvferry.router.api import ApiError
from transfer.errors import ConfigError


class ChatTemplate:
    """A tokenizer with its chat template; loading it takes seconds.

    Raises:
        ConfigError: There is none, or it cannot be loaded.
    """

    def __init__(self, directory: Path) -> None:
        if not os.path.isdir(directory):  # Path.is_dir raises OSError for a name that is too long
            raise ConfigError(f"--tokenizer is {directory}; it must be a Hugging Face directory with a tokenizer")
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
        except Exception as error:  # the library has no kind of its own for what is wrong with a directory
            reason = " ".join(str(error).split())[:300]
            raise ConfigError(f"--tokenizer is {directory}; no tokenizer can be loaded from it: {reason}") from error
        if not getattr(self._tokenizer, "chat_template", None):
            raise ConfigError(f"--tokenizer is {directory}; its tokenizer has no chat template")
        self._own_arguments = frozenset(inspect.signature(self._tokenizer.apply_chat_template).parameters)

    async def token_ids(self, body: Mapping[str, Any]) -> list[int]:
        """The prompt of a chat, the beginning of the assistant's answer included.

        Raises:
            ApiError: The messages cannot be told to the model.
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
        except Exception as error:  # templates raise what they like, for a role that they do not know, for example
            reason = " ".join(str(error).split())[:300]
            raise ApiError(400, f"messages do not fit the model's chat template: {reason}", param="messages") from error
        # The template has written the special tokens already.
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


def _checked(messages: object) -> list[dict[str, Any]]:
    """Messages of text alone, each with its content as one text."""
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
