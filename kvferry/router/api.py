"""What the HTTP side of the router and what stands behind it tell each other."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from node_runtime.health import Readiness  # imports aiohttp, which the process for costly bodies does not need

COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"

JSON_TYPE: Final = "application/json"
SSE_TYPE: Final = "text/event-stream"

_TYPES: Final = {400: "BadRequestError", 404: "NotFoundError", 413: "BadRequestError", 503: "ServiceUnavailableError"}


class ApiError(Exception):
    """An answer that is an error, in OpenAI's shape. It is no fault of kvferry's, so no `TransferError`.

    Args:
        status: HTTP status.
        message: One line for the client.
        param: Field of the body that it is about.
        retry_after_s: When the client may try again.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[Callable[..., ApiError], tuple[int, str]]:
        """Support pickling: an error can come from the process that parses a costly body."""
        return partial(ApiError, param=self.param, retry_after_s=self.retry_after_s), (self.status, self.message)

    def body(self) -> bytes:
        """As a JSON object."""
        kind = _TYPES.get(self.status, "InternalServerError" if self.status >= 500 else "BadRequestError")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.status}
        return json.dumps({"error": error}).encode()

    def event(self) -> bytes:
        """As the last event of a stream that had begun."""
        return b"data: " + self.body() + b"\n\n"


Body = TypeVar("Body")
"""A backend's representation of a request's body."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[Body]):
    """A client's request to generate.

    Args:
        path: `COMPLETIONS` or `CHAT`.
        body: The result of the backend's `read`.
        headers: Those that go on to the servers.
        request_id: Names it in the log and to the client.
    """

    path: str
    body: Body
    headers: Mapping[str, str] = field(default_factory=dict)
    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The beginning of an answer.

    Args:
        status: HTTP status.
        content_type: Of what follows.
        is_stream: Parts follow until the end; else one part, which is all.
        retry_after: The header of that name, where the server gave one.
    """

    status: int = 200
    content_type: str = JSON_TYPE
    is_stream: bool = False
    retry_after: str | None = None


class Backend(Protocol[Body]):
    """What generates: vLLM servers, or kvferry's own nodes."""

    async def watch(self) -> None:
        """Check the servers' health, for ever."""

    def readiness(self) -> Readiness:
        """Whether requests can be served now."""
        ...

    def num_servers(self) -> Mapping[tuple[str, str], int]:
        """How many servers there are, by tier and state (`kvferry.router.servers.STATES`)."""
        ...

    async def models(self, headers: Mapping[str, str]) -> tuple[Head, bytes]:
        """The answer to `/v1/models`.

        Raises:
            ApiError: There is none.
        """
        ...

    async def read(self, path: str, content: bytes) -> Body:
        """Read the body of a request to `path`.

        Raises:
            ApiError: The servers cannot accept the body.
        """
        ...

    def answer(self, call: Call[Body]) -> AsyncGenerator[Head | bytes, None]:
        """A `Head`, then its parts. Closed or cancelled early, whatever runs at the servers for it is cancelled.

        Raises:
            ApiError: Before the head: the answer is this error. After it: the answer was cut off.
        """
        ...

    async def close(self) -> None:
        """Close all connections."""
