"""Processes that host a kvferry and die, or stand still, with prompts under way: the other side's engine hears of it in time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from kvferry.engines.connector import DECODE, PREFILL, Sides
from tests.cluster.engines.connector.other_process import OtherProcess
from tests.connector.conftest import Start
from tests.connector.instances import PAGES, Instance, prompt_of, wait_for

pytestmark = pytest.mark.timeout(240)

PROMPTS = [prompt_of(100, seed=index) for index in range(3)]
FROM = [list(range(7 * index, 7 * index + 7)) for index in range(3)]
TO = [list(range(PAGES - 7 * index - 7, PAGES - 7 * index)) for index in range(3)]
HEARD_WITHIN_S = 40.0  # two seconds on a machine of one's own, and five more for a side that may come back
FROZEN_S = 5.0
QUICK = {"heartbeat.interval_s": 0.5}

Elsewhere = Callable[..., OtherProcess]


@pytest.fixture
def elsewhere() -> Iterator[Elsewhere]:
    """Starts an instance in a process of its own, and kills it at the end."""
    with ExitStack() as stack:

        def begin(sides: Sides, **said: Any) -> OtherProcess:
            process = OtherProcess(sides, **said)
            stack.callback(process.kill)
            return process

        yield begin


def offer_elsewhere(source: OtherProcess, name: str, index: int, end: int) -> None:
    source.call("leader.offer", name, name, PROMPTS[index])
    source.call("leader.begin", name)
    source.call("compute", name, FROM[index], PROMPTS[index], 0, end)


def want_all(source: OtherProcess, decode: Instance) -> None:
    """Three prompts, all under way."""
    wait_for(decode.joined, "joined")
    for index, prompt in enumerate(PROMPTS):
        decode.leader.want(f"b{index}", f"a{index}", source.address, prompt)
        decode.leader.bind(f"b{index}", [TO[index]])
        offer_elsewhere(source, f"a{index}", index, 40)
    wait_for(lambda: all(rank.num_transfers for rank in decode.ranks), "under way")


def all_fail(decode: Instance) -> None:
    began = time.monotonic()
    for index in range(len(PROMPTS)):
        assert decode.settled(f"b{index}").failure
    assert time.monotonic() - began < HEARD_WITHIN_S
    decode.assert_idle()
    decode.leader.check()


def goes_through(source: OtherProcess, decode: Instance, name: str) -> None:
    wait_for(decode.joined, "joined again")
    decode.leader.want(name, name, source.address, PROMPTS[0])
    decode.leader.bind(name, [TO[0]])
    offer_elsewhere(source, name, 0, 100)
    source.call("finish", name)
    assert decode.settled(name).failure == ""
    decode.assert_has(TO[0], PROMPTS[0])
    assert source.call("freed", name).failure == ""


def test_the_process_of_a_source_is_killed(elsewhere: Elsewhere, start: Start) -> None:
    source = elsewhere(PREFILL, tp_size=2, settings=QUICK)
    decode = start(DECODE, settings=QUICK | {"peers.prefill_nodes": (source.address,)})
    want_all(source, decode)
    source.kill()
    all_fail(decode)
    port = int(source.address.rpartition(":")[2])
    again = elsewhere(PREFILL, tp_size=2, settings=QUICK | {"server.port": port})
    goes_through(again, decode, "next")
    decode.assert_idle()


def test_the_process_of_a_source_is_frozen(elsewhere: Elsewhere, start: Start) -> None:
    """What is given up meanwhile it hears when it is joined again, long before `limits.hold_s`."""
    source = elsewhere(PREFILL, tp_size=2, settings=QUICK)
    decode = start(DECODE, settings=QUICK | {"peers.prefill_nodes": (source.address,)})
    want_all(source, decode)
    with source.frozen():
        decode.leader.cancel("b0", "its client went away")
        time.sleep(FROZEN_S)
        lost = [decode.leader.num_joined == 0]
    wait_for(decode.joined, "joined again")
    assert lost == [True], "it was seen while it stood still"
    # The same life goes on, and has the prompts: another try of each gets through, or has failed while it stood still.
    for index in range(len(PROMPTS)):
        source.call("compute", f"a{index}", FROM[index], PROMPTS[index], 40, 100)
        source.call("finish", f"a{index}")
    for index, prompt in enumerate(PROMPTS):
        if not decode.settled(f"b{index}").failure:
            decode.assert_has(TO[index], prompt)
        source.call("freed", f"a{index}")
    source.call("assert_idle")
    decode.assert_idle()
    goes_through(source, decode, "next")


def begin_all(source: Instance, decode: OtherProcess) -> None:
    wait_for(lambda: source.leader.num_joined == 1, "joined")
    for index, prompt in enumerate(PROMPTS):
        decode.call("leader.want", f"b{index}", f"a{index}", source.leader.address, prompt)
        decode.call("leader.bind", f"b{index}", [TO[index]])
        source.leader.offer(f"a{index}", f"a{index}", prompt)
        source.leader.begin(f"a{index}")
        source.compute(f"a{index}", FROM[index], prompt, 0, 40)
    wait_for(lambda: source.leader.outgoing.requests.num_transfers == len(PROMPTS), "under way")
    time.sleep(0.2)


def end_all(source: Instance) -> None:
    for index, prompt in enumerate(PROMPTS):
        source.compute(f"a{index}", FROM[index], prompt, 40, 100)
        source.finish(f"a{index}")
    for index in range(len(PROMPTS)):
        source.freed(f"a{index}")
    source.assert_idle()
    source.leader.check()


@pytest.mark.parametrize("fault", ["killed", "frozen"])
def test_the_process_of_a_target_is_lost(elsewhere: Elsewhere, start: Start, fault: str) -> None:
    source = start(PREFILL, tp_size=2, settings=QUICK | {"limits.hold_s": 1.0})
    decode = elsewhere(DECODE, settings=QUICK | {"peers.prefill_nodes": (source.leader.address,)})
    begin_all(source, decode)
    if fault == "killed":
        decode.kill()
        wait_for(lambda: source.leader.num_joined == 0, "the loss is seen", timeout_s=HEARD_WITHIN_S)
        end_all(source)
        decode = elsewhere(DECODE, settings=QUICK | {"peers.prefill_nodes": (source.leader.address,)})
    else:
        with decode.frozen():
            wait_for(lambda: source.leader.num_joined == 0, "the loss is seen", timeout_s=HEARD_WITHIN_S)
            end_all(source)
        for index in range(len(PROMPTS)):
            assert decode.call("settled", f"b{index}").failure
        decode.call("assert_idle")
    wait_for(lambda: source.leader.num_joined == 1, "joined again")
    decode.call("leader.want", "next", "next", source.leader.address, PROMPTS[0])
    decode.call("leader.bind", "next", [TO[0]])
    source.leader.offer("next", "next", PROMPTS[0])
    source.leader.begin("next")
    source.compute("next", FROM[0], PROMPTS[0], 0, 100)
    source.finish("next")
    assert decode.call("settled", "next").failure == ""
    decode.call("assert_has", TO[0], PROMPTS[0])
    assert source.freed("next").failure == ""
