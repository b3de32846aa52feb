"""Fake nodes that answer over gRPC like kvferry's own, with the options of `VllmServer`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc

from transfer.pb import kvferry_pb2 as pb
from transfer.pb import kvferry_pb2_grpc as pb_grpc
from transfer.registry.security import PlainText, Security
from transfer.registry.server import RegistryServer, serve

SAID = "told to fail"


@dataclass(eq=False)
class Node:
    """A node of `role`.

    Args:
        health: 200 if the node is ready.
        problem: Why it is not ready.
        security: TLS or plain text of calls to it.
    """

    role: str = "decode"
    health: int = 200
    problem: str = "tired"
    security: Security = field(default_factory=PlainText)
    running: int = 0
    url: str = ""

    def __post_init__(self) -> None:
        self._server: RegistryServer | None = None

    async def start(self) -> None:
        control: Any = self
        own = {"decode_control": control} if isinstance(self, DecodeNode) else {"prefill_control": control}
        self._server = await serve("127.0.0.1", 0, security=self.security, **own)
        self.url = f"grpc://127.0.0.1:{self._server.port}"

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.close(grace_s=0)

    async def Status(self, request: pb.StatusRequest, context: Any) -> pb.NodeStatus:
        is_ready = self.health == 200
        return pb.NodeStatus(role=self.role, state="ready", ready=is_ready, not_ready_reason="" if is_ready else self.problem)


@dataclass(eq=False)
class PrefillNode(Node, pb_grpc.PrefillControlServicer):
    """A node that only reports its role."""

    role: str = "prefill"


@dataclass(eq=False)
class DecodeNode(Node, pb_grpc.DecodeControlServicer):
    """A decode node.

    Args:
        words: Texts that it generates, after the prompt's length.
        word_delay_s: Between two of them.
        gate: No token comes before this is set.
        answers: Codes with which the next requests fail, one each.
        break_after: Number of tokens after which a request fails. None means that it does not fail.
    """

    words: tuple[str, ...] = (" one", "", " two", " three")
    word_delay_s: float = 0.0
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    answers: list[grpc.StatusCode] = field(default_factory=list)
    break_after: int | None = None
    requests: list[pb.GenerateRequest] = field(default_factory=list)
    disconnected: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.gate.set()

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateEvent]:
        self.requests.append(request)
        self.running += 1
        try:
            yield pb.GenerateEvent(accepted=pb.GenerateAccepted(request_id="r1", prompt_tokens=2))
            await self.gate.wait()
            if self.answers:
                await context.abort(self.answers.pop(0), SAID)
            words = (f"<{len(request.prompt)}>", *self.words)[: request.max_new_tokens]
            for number, text in enumerate(words):
                if number == self.break_after:
                    await context.abort(grpc.StatusCode.UNAVAILABLE, SAID)
                yield pb.GenerateEvent(tokens=pb.GeneratedTokens(token_ids=[number], text=text))
                await asyncio.sleep(self.word_delay_s)
            yield pb.GenerateEvent(done=pb.GenerateDone(finish_reason="stop", prompt_tokens=2, generated_tokens=len(words)))
        except (asyncio.CancelledError, GeneratorExit):  # the latter if gRPC was sending an event
            self.disconnected += 1
            raise
        finally:
            self.running -= 1
