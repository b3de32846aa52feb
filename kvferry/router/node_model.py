"""The model of kvferry's own decode nodes, by which a router reads requests for them."""

from __future__ import annotations

import json
import time
from typing import Final

from kvferry.router import node_body
from kvferry.router.api import CHAT, Answer, ApiError
from kvferry.router.body_reader import BodyReader, is_light
from kvferry.router.chat_template import ChatTemplate
from kvferry.router.node_body import NodeBody
from kvferry.router.settings import RouterSettings

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
        """Return the request of a client for a decode node.

        Raises:
            ApiError: A decode node does not support the request in the body.
        """
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
