"""The clients of the soak: requests of mixed lengths that stay, leave, run out of time or are aborted, each judged at its end."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from kvferry.cli.node_client import NodeClient
from kvferry.demo.prompts import BUILT_IN
from transfer.errors import PeerUnreachable, TransferAborted, TransferError, TransportTimeout
from transfer.pb import kvferry_pb2 as pb

MAX_NEW_TOKENS = 24
MAX_WORDS = 600
BOUND_S = 60.0
"""No request may take longer, whatever happens around it: the nodes notice every fault within 2 s and start again in some ten."""

_WORDS = " ".join(BUILT_IN).split()
_SHORTEST_DEADLINE_S, _LONGEST_DEADLINE_S = 0.05, 1.5
_LONGEST_STAY_S = 1.5
_PAUSE_AFTER_FAILURE_S = 0.2


class Plan(StrEnum):
    """What a client does with its request."""

    STAYS = "stays"
    LEAVES = "leaves"
    RUNS_OUT_OF_TIME = "runs out of time"
    IS_ABORTED = "is aborted"


_SHARES = {Plan.STAYS: 70, Plan.LEAVES: 15, Plan.RUNS_OUT_OF_TIME: 8, Plan.IS_ABORTED: 7}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A text, and the tokens that one process without any transfer generates from it, greedily."""

    text: str
    num_tokens: int
    expected: tuple[int, ...]


def make_texts(number: int, seed: int) -> list[str]:
    """Different texts of one to `MAX_WORDS` words; as many between 1 and 10 words as between 60 and 600."""
    chance = random.Random(seed)
    return [f"{index}. " + " ".join(chance.choices(_WORDS, k=round(MAX_WORDS ** chance.random()))) for index in range(number)]


@dataclass(slots=True, kw_only=True)
class Tally:
    """What became of the requests.

    Attributes:
        ends: Requests by how they ended.
        num_tokens_verified: Generated tokens that were compared with the reference, also of requests that did not end well.
        violations: One line for each thing that must never happen; only the first ones.
        served_s: From asking to the last token, of the requests that ended well.
    """

    ends: Counter[str] = field(default_factory=Counter)
    num_tokens_verified: int = 0
    num_violations: int = 0
    violations: list[str] = field(default_factory=list)
    served_s: list[float] = field(default_factory=list)

    @property
    def num_requests(self) -> int:
        return self.ends.total()

    def violate(self, line: str) -> None:
        self.num_violations += 1
        if len(self.violations) < 20:
            self.violations.append(line)


class Traffic:
    """Keeps `num_clients` requests in flight, each with its own fate.

    Args:
        address: host:port of the decode node, which keeps it when it is started again.
        prompts: What is asked.
        num_clients: Requests at once.
        seed: Of every choice that is made here.
        may_be_unreachable: Whether a fault explains a request that ended UNAVAILABLE; asked with the time when it began.
    """

    def __init__(
        self,
        address: str,
        prompts: Sequence[Prompt],
        *,
        num_clients: int,
        seed: int,
        may_be_unreachable: Callable[[float], bool],
    ) -> None:
        self.tally = Tally()
        self._address = address
        self._prompts = prompts
        self._num_clients = num_clients
        self._chance = random.Random(seed)
        self._may_be_unreachable = may_be_unreachable
        self._tasks: list[asyncio.Task[None]] = []
        self._is_stopping = False

    def start(self) -> None:
        self._is_stopping = False
        self._tasks = [asyncio.create_task(self._client()) for _ in range(self._num_clients)]

    async def stop(self) -> None:
        """Begin no more requests, and wait for the end of those in flight.

        Raises:
            Exception: What a client did not expect: a bug of the benchmark.
        """
        self._is_stopping = True
        await asyncio.gather(*self._tasks)

    async def _client(self) -> None:
        while not self._is_stopping:
            plan = self._chance.choices(list(_SHARES), weights=list(_SHARES.values()))[0]
            end = await self._request(plan, self._chance.choice(self._prompts), self._chance.randint(1, MAX_NEW_TOKENS))
            self.tally.ends[end] += 1
            if end == "unavailable":
                await asyncio.sleep(_PAUSE_AFTER_FAILURE_S)

    async def _request(self, plan: Plan, prompt: Prompt, num_new: int) -> str:
        """Ask once, judge what comes; how it ended, in a word."""
        request_id = f"soak-{self._chance.getrandbits(64):016x}"
        question = pb.GenerateRequest(request_id=request_id, prompt=prompt.text, max_new_tokens=num_new, ignore_eos=True)
        time_s = self._chance.uniform(_SHORTEST_DEADLINE_S, _LONGEST_DEADLINE_S)
        deadline_s = time_s if plan is Plan.RUNS_OUT_OF_TIME else BOUND_S
        tokens: list[int] = []
        began_s = time.monotonic()
        try:
            async with NodeClient(self._address) as client:
                asking = asyncio.ensure_future(self._collect(client, question, deadline_s, tokens))
                try:
                    if plan in (Plan.LEAVES, Plan.IS_ABORTED):
                        await asyncio.wait([asking], timeout=self._chance.uniform(0, _LONGEST_STAY_S))
                    if plan is Plan.LEAVES and not asking.done():
                        asking.cancel()
                        await asyncio.wait([asking])
                        return "left"
                    if plan is Plan.IS_ABORTED and not asking.done():
                        await client.abort(request_id, reason="the soak aborts it")
                    await asking
                finally:
                    asking.cancel()
                    await asyncio.wait([asking])
        except TransferError as error:
            return self.judge_failure(plan, error, began_s, deadline_s, request_id)
        finally:
            self.judge_tokens(prompt, tokens, request_id)
        if len(tokens) != num_new:
            self.tally.violate(f"{request_id}: {len(tokens)} tokens instead of {num_new}, and no error")
        self.tally.served_s.append(time.monotonic() - began_s)
        return "served"

    @staticmethod
    async def _collect(client: NodeClient, question: pb.GenerateRequest, deadline_s: float, tokens: list[int]) -> None:
        async for event in client.generate(question, accept_timeout_s=deadline_s, timeout_s=deadline_s):
            if event.HasField("tokens"):
                tokens.extend(event.tokens.token_ids)

    def judge_tokens(self, prompt: Prompt, tokens: Sequence[int], request_id: str) -> None:
        """Count the tokens of a request that ended in any way; tokens that differ from the expected ones are a violation."""
        self.tally.num_tokens_verified += len(tokens)
        expected = prompt.expected[: len(tokens)]
        if tuple(tokens) != expected:
            self.tally.violate(f"{request_id}: prompt of {prompt.num_tokens} tokens gave {list(tokens)}, not {list(expected)}")

    def judge_failure(self, plan: Plan, error: TransferError, began_s: float, deadline_s: float, request_id: str) -> str:
        """Return what a failed request counts as; an end that neither its plan nor a fault explains is a violation."""
        took_s = time.monotonic() - began_s
        match error:
            case TransportTimeout() if plan is Plan.RUNS_OUT_OF_TIME:
                return "out of time"
            case TransferAborted() if plan is Plan.IS_ABORTED:
                return "aborted"
            case PeerUnreachable() if self._may_be_unreachable(began_s):
                return "unavailable"
            case TransportTimeout():
                self.tally.violate(f"{request_id}: still not over after {deadline_s:g} s")
                return "hung"
        self.tally.violate(f"{request_id} ({plan}): after {took_s:.1f} s {type(error).__name__}: {error}")
        return "failed without a fault"
