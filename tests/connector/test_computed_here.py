"""Prompts that a prefill side has its engine compute because a decode side asks for them, and no router has sent them."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from tests.connector.conftest import Pair
from tests.connector.instances import PROMPT, TO, Instance, wait_for
from transfer.connector.outgoing import Transfer
from transfer.errors import ConfigError
from transfer.pb import kvferry_pb2 as pb
from transfer.pb import kvferry_pb2_grpc as pb_grpc


class Front:
    """An engine's API: notes what it is asked, and answers when it is told to."""

    def __init__(self) -> None:
        self.asked: list[Transfer] = []
        self.cancelled: list[Transfer] = []
        self.failure: Exception | None = None
        self.answer = asyncio.Event()

    async def __call__(self, transfer: Transfer) -> None:
        self.asked.append(transfer)
        if self.failure is not None:
            raise self.failure
        try:
            await self.answer.wait()
        except asyncio.CancelledError:
            self.cancelled.append(transfer)
            raise


@pytest.fixture
def front() -> Front:
    return Front()


def asked(pair: Pair, front: Front, **source: Any) -> tuple[Instance, Instance, str]:
    """Both sides, the one asked by the other for prompt "b"; and the id under which the engine's API is to be given it."""
    first, second = pair({"compute": front, **source})
    second.leader.want("b", "", first.leader.address, PROMPT)
    wait_for(lambda: bool(front.asked), "the engine's API is asked")
    assert front.asked[0].token_ids == PROMPT
    return first, second, front.asked[0].engine_request


def computed(source: Instance, name: str, transfer_id: str) -> None:
    source.computes(name, transfer_id)


def test_a_prompt_computed_for_a_call_is_sent_to_its_caller(pair: Pair, front: Front) -> None:
    source, decode, transfer_id = asked(pair, front, tp_size=2)
    computed(source, "a", transfer_id)
    decode.wait_until_ready("b")
    decode.leader.bind("b", [TO])
    source.finish("a", first_token=7)
    assert decode.settled("b").failure == ""
    decode.assert_has(TO, PROMPT)
    assert source.freed("a").failure == ""
    source.assert_idle()


def test_a_caller_that_leaves_before_the_engine_has_its_prompt(pair: Pair, front: Front) -> None:
    """The call is given up; what the engine makes of it all the same is held for nobody."""
    source, decode, transfer_id = asked(pair, front)
    decode.leader.cancel("b", "its client went away")
    wait_for(lambda: front.cancelled == front.asked, "the call is cancelled")
    computed(source, "a", transfer_id)
    source.finish("a", first_token=7)
    assert "gave the request up" in source.freed("a").failure
    source.assert_idle()
    decode.assert_idle()


def test_the_engine_refuses_it(pair: Pair, front: Front) -> None:
    front.failure = ConfigError("the engine's API refuses (400): too long")
    _, decode, _ = asked(pair, front)
    assert "the engine's API refuses (400): too long" in decode.wait_until_failed("b")


async def ask_with_salt(source: Instance, decode: Instance, front: Front) -> str:
    """As a decode node does whose client keeps tenants apart; returns the salt that the engine's API is told."""
    request = pb.PrefillRequest(
        request_id="salted",
        token_ids=PROMPT,
        decode_incarnation=decode.leader.incarnation,
        sampling=pb.SamplingParams(top_p=1.0),
        cache_salt="tenant",
    )
    async with grpc.aio.insecure_channel(source.leader.address) as channel:
        stub: Any = pb_grpc.PrefillControlStub(channel)
        call = stub.Prefill(request)
        async with asyncio.timeout(60):
            while len(front.asked) < 2:
                await asyncio.sleep(0.01)
        call.cancel()
    return front.asked[1].cache_salt


def test_the_engine_is_told_the_salt(pair: Pair, front: Front) -> None:
    source, decode, _ = asked(pair, front)
    assert front.asked[0].cache_salt == ""
    assert asyncio.run(ask_with_salt(source, decode, front)) == "tenant"
    wait_for(lambda: front.cancelled == front.asked[1:], "who asked is gone")
    decode.leader.cancel("b", "its client went away")
    wait_for(lambda: len(front.cancelled) == 2, "the other, too")
    source.assert_idle()
    decode.assert_idle()


def test_another_engine_computes_it(pair: Pair, front: Front) -> None:
    """As where the API is that of a second instance: said at once, not after limits.meet_timeout_s."""
    front.answer.set()
    _, decode, _ = asked(pair, front)
    assert "another engine computed the prompt" in decode.wait_until_failed("b")
