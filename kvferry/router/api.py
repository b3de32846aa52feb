"""Values between the HTTP side of the router and its servers. Pure."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final

COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"

JSON_TYPE: Final = "application/json"
SSE_TYPE: Final = "text/event-stream"

_TYPES: Final = {400: "BadRequestError", 404: "NotFoundError", 413: "BadRequestError", 503: "ServiceUnavailableError"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """Body of a request, as it is sent to the servers.

    Args:
        prompt_tokens: Estimated number of tokens of the prompt.
        alone: Why the decode server must compute the prompt itself, as one constant word. None means that it need not.
    """

    prompt_tokens: int = 1
    alone: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A client's request to generate.

    Args:
        path: `COMPLETIONS` or `CHAT`.
        body: Parsed for the kind of the decode servers.
        headers: Headers that are passed on to the servers.
    """

    path: str
    body: Body
    headers: Mapping[str, str] = field(default_factory=dict)
    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer to a client.

    Args:
        content: The whole content, or the first part of a stream.
        rest: The other parts of a stream. None means that the answer is no stream.
        retry_after: The header of that name.
    """

    content: bytes
    rest: AsyncGenerator[bytes, None] | None = None
    status: int = 200
    content_type: str = JSON_TYPE
    retry_after: str | None = None


class ApiError(Exception):
    """An error in OpenAI's shape, as an answer to the client.

    Args:
        status: HTTP status.
        message: One line for the client.
        param: Invalid field of the body.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param

    def __reduce__(self) -> tuple[Callable[..., ApiError], tuple[int, str]]:
        """Support pickling, for errors of the process that parses a costly body."""
        return partial(ApiError, param=self.param), (self.status, self.message)

    def answer(self) -> Answer:
        """Return the error as an answer."""
        retry_after = "1" if self.status in (429, 503) else None  # the client may try again
        return Answer(status=self.status, content=self._content(), retry_after=retry_after)

    def event(self) -> bytes:
        """Return the error as the last event of a stream."""
        return b"data: " + self._content() + b"\n\n"

    def _content(self) -> bytes:
        kind = _TYPES.get(self.status, "InternalServerError" if self.status >= 500 else "BadRequestError")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.status}
        return json.dumps({"error": error}).encode()


class PassedOn(ApiError):
    """A server rejected the client's request. Its answer goes to the client unchanged."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.status, f"passed on: {answer.status}")
        self._answer = answer

    def answer(self) -> Answer:
        """Return the server's answer."""
        return self._answer
