"""Helpers of cluster tests: calls to nodes, expected tokens, and bounded waits."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import grpc
import torch
from transformers import AutoModelForCausalLM

from kvferry.cli.node_client import NodeClient
from kvferry.local_cluster.cluster import ClusterNode
from transfer.errors import TransferError
from transfer.pb import kvferry_pb2 as pb
from transfer.pb import kvferry_pb2_grpc as pb_grpc
from transfer.plain_text import ANYWHERE
from transfer.registry.peer_channel import PeerChannel
from transfer.registry.security import MutualTls, PlainText

if TYPE_CHECKING:
    from transfer.pb.kvferry_pb2_grpc import DecodeControlAsyncStub, PrefillControlAsyncStub, TransferControlAsyncStub

ANSWER_S = 60.0
"""Time limit of a request. It is long enough for a loaded machine, and ends a request that hangs."""


def prompt(num_tokens: int, variant: int = 0) -> tuple[int, ...]:
    """Return token ids of the demo model's vocabulary. Any two variants differ in one of the first two tokens."""
    return tuple((position * (37 + variant // 700) + 11 * variant + 5) % 700 + 3 for position in range(num_tokens))


@dataclass(slots=True, kw_only=True)
class Answer:
    """Result of one Generate call.

    Args:
        tokens: Generated ids so far.
        done: Last event; None while the call runs or if it failed.
        code: Status code of the call; None while it runs.
        details: Status text.
        ended_s: Monotonic time of the end; 0 while the call runs.
    """

    request_id: str = ""
    tokens: list[int] = field(default_factory=list)
    done: pb.GenerateDone | None = None
    code: grpc.StatusCode | None = None
    details: str = ""
    ended_s: float = 0.0


def decode_control(channel: grpc.aio.Channel) -> DecodeControlAsyncStub:
    return cast("DecodeControlAsyncStub", pb_grpc.DecodeControlStub(channel))


def prefill_control(channel: grpc.aio.Channel) -> PrefillControlAsyncStub:
    return cast("PrefillControlAsyncStub", pb_grpc.PrefillControlStub(channel))


def transfer_control(channel: grpc.aio.Channel) -> TransferControlAsyncStub:
    return cast("TransferControlAsyncStub", pb_grpc.TransferControlStub(channel))


class Caller:
    """Client of a decode node with its own connection. Use it as an async context manager.

    Args:
        address: host:port of the node.
        security: Credentials of the client; None means plain text.
    """

    def __init__(self, address: str, security: MutualTls | None = None) -> None:
        self._secure = None if security is None else PeerChannel(address, security)
        self.channel = grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
        self.stub = decode_control(self.channel)
        self.tasks: list[asyncio.Task[Answer]] = []

    async def __aenter__(self) -> Caller:
        if self._secure is not None:
            await self.channel.close()
            self.channel = await self._secure.ready()
            self.stub = decode_control(self.channel)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.channel.close()

    async def ask(
        self,
        token_ids: Sequence[int],
        max_new_tokens: int = 16,
        *,
        answer: Answer | None = None,
        timeout_s: float = ANSWER_S,
        sampling: pb.SamplingParams | None = None,
    ) -> Answer:
        """Generate greedily and ignore the end token; fill `answer` while tokens arrive, and return it even if the call fails."""
        answer = answer if answer is not None else Answer()
        call = self.stub.Generate(
            pb.GenerateRequest(
                request_id=answer.request_id,
                token_ids=pb.TokenIds(ids=token_ids),
                max_new_tokens=max_new_tokens,
                ignore_eos=True,
                sampling=sampling,
            ),
            timeout=timeout_s,
        )
        try:
            async for event in call:
                match event.WhichOneof("event"):
                    case "accepted":
                        answer.request_id = event.accepted.request_id
                    case "tokens":
                        answer.tokens.extend(event.tokens.token_ids)
                    case "done":
                        answer.done = event.done
            answer.code = grpc.StatusCode.OK
        except grpc.aio.AioRpcError as error:
            answer.code, answer.details = error.code(), error.details() or ""
        except asyncio.CancelledError:
            call.cancel()
            raise
        finally:
            answer.ended_s = time.monotonic()
        return answer

    def begin(
        self, token_ids: Sequence[int], max_new_tokens: int = 16, *, request_id: str = "", timeout_s: float = ANSWER_S
    ) -> tuple[Answer, asyncio.Task[Answer]]:
        """Start `ask()` in a task; cancel the task to disconnect as a client."""
        answer = Answer(request_id=request_id)
        task = asyncio.ensure_future(self.ask(token_ids, max_new_tokens, answer=answer, timeout_s=timeout_s))
        self.tasks.append(task)
        return answer, task


class Reference:
    """Greedy tokens of transformers' own `generate` in this process, with its own attention and cache."""

    def __init__(self, directory: Path) -> None:
        loader: Any = AutoModelForCausalLM
        self._model: Any = loader.from_pretrained(directory, dtype=torch.float32, local_files_only=True).eval()
        self._known: dict[tuple[int, ...], list[int]] = {}

    def tokens(self, token_ids: Sequence[int], num_tokens: int) -> list[int]:
        key = tuple(token_ids)
        if len(self._known.get(key, [])) < num_tokens:
            ids = torch.tensor([key])
            output = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_tokens,
                do_sample=False,
                eos_token_id=[1_000_000],
                pad_token_id=0,
            )
            self._known[key] = output[0, len(key) :].tolist()
        return self._known[key][:num_tokens]

    def check(self, token_ids: Sequence[int], answer: Answer) -> None:
        """Check that the answer is complete and matches the single-process reference."""
        assert answer.code is grpc.StatusCode.OK, f"{len(token_ids)} tokens: {answer.code}: {answer.details}"
        assert answer.done is not None and answer.done.generated_tokens == len(answer.tokens)
        expected = self.tokens(token_ids, len(answer.tokens))
        assert answer.tokens == expected, f"prompt of {len(token_ids)} tokens: {answer.tokens} instead of {expected}"


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    """Stop the process inside the block, and resume it at the end, also after an error."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def until(is_true: Callable[[], bool | Awaitable[bool]], what: str, *, within_s: float = 30.0) -> float:
    """Poll until `is_true` returns True; return the seconds that passed. Fail with `what` after `within_s` seconds."""
    started_s = time.monotonic()
    while True:
        outcome = is_true()
        if await outcome if inspect.isawaitable(outcome) else outcome:
            return time.monotonic() - started_s
        assert time.monotonic() - started_s < within_s, f"not within {within_s:g} s: {what}"
        await asyncio.sleep(0.02)


async def status_of(node: ClusterNode) -> pb.NodeStatus | None:
    """Return the status of a node; None if the call fails."""
    try:
        async with NodeClient(node.address, security=node.security or PlainText(insecure=ANYWHERE)) as client:
            return await client.status(timeout_s=5.0)
    except TransferError:
        return None


_IDLE_FIELDS = (
    "pool_pages_reserved",
    "pool_pages_bound",
    "ring_live_bytes",
    "ring_live_grants",
    "ring_quarantined_bytes",
    "staging_slots_used",
    "requests",
    "pending_transfers",
    "ending_sessions",
)


def leftovers(status: pb.NodeStatus | None) -> list[str]:
    """Return the resources that a node still holds; an empty list means that it is idle."""
    if status is None:
        return ["no status"]
    held = [f"{name}={getattr(status, name)}" for name in ("queued_requests", "running_requests") if getattr(status, name)]
    for rank in status.ranks:
        held += [f"rank {rank.rank} {name}={getattr(rank, name)}" for name in _IDLE_FIELDS if getattr(rank, name)]
    return held


async def until_idle(*nodes: ClusterNode, within_s: float = 30.0) -> None:
    """Wait until the nodes hold nothing of any request; list the remaining resources after `within_s` seconds."""
    held: dict[str, list[str]] = {}

    async def is_idle() -> bool:
        for node in nodes:
            held[f"{node.role} node {node.address}"] = leftovers(await status_of(node))
        return not any(held.values())

    started_s = time.monotonic()
    while not await is_idle():
        assert time.monotonic() - started_s < within_s, f"still held after {within_s:g} s: {held}"
        await asyncio.sleep(0.1)
