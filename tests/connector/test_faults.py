"""A fault between two connectors is reported to both, affects neither and leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from kvferry.engines.connector import DECODE, PREFILL
from kvferry.engines.connector_leader import ConnectorLeader
from node_runtime.rank_link import LeaderLink
from tests.connector.conftest import Pair, Start
from tests.connector.instances import FROM, PROMPT, TIMEOUT_S, TO, Instance, hand_over, wait_for
from tests.runtime.instances import hello
from transfer.config import ConnectorConfig
from transfer.connector import decode_service
from transfer.connector.rank_report import RankReady
from transfer.errors import ConfigError, TransferError
from transfer.load_config import load_config
from transfer.registry.security import PlainText


def begun(source: Instance, decode: Instance, *, num_computed: int = 40) -> None:
    """Prompt "a" is computed up to there, and on its way into "b"."""
    decode.leader.want("b", "t", source.leader.address, PROMPT)
    source.leader.offer("a", "t", PROMPT)
    source.leader.begin("a")
    source.compute("a", FROM, PROMPT, 0, num_computed)
    decode.wait_until_ready("b")
    decode.leader.bind("b", [TO])


def test_a_computed_prompt_that_nobody_wants_any_more_is_free_at_once(pair: Pair) -> None:
    """Not only after `limits.hold_s`: the decode side says so, whether it had asked for it before or not."""
    source, decode = pair()
    for number, was_wanted in enumerate((True, False)):
        name = f"t{number}"
        source.sends(name, name)
        if was_wanted:
            decode.leader.want(name, name, source.leader.address, PROMPT)
            decode.leader.cancel(name, "its client went away")
        else:
            decode.leader.decline(name, source.leader.address, "its client went away")
        assert "its client went away" in source.freed(name).failure
    decode.leader.decline("t2", source.leader.address, "its client went away")  # before the prefill side's engine has it
    wait_for(lambda: decode.leader.is_idle, "idle")
    time.sleep(0.3)
    source.leader.offer("t2", "t2", PROMPT)
    source.leader.begin("t2")
    source.finish("t2")
    assert "its client went away" in source.freed("t2").failure
    hand_over(source, decode, "next")


def test_nobody_asks_for_a_computed_prompt(pair: Pair) -> None:
    source, decode = pair({"tp_size": 2})
    source.limits.hold_s = 0.1
    source.sends("a", "t")
    assert source.freed("a").failure == "no decode side has asked for it within 0.1 s (limits.hold_s)"
    source.limits.hold_s = TIMEOUT_S
    decode.leader.want("b", "t", source.leader.address, PROMPT)
    assert "prompt t is over: no decode side has asked for it" in decode.wait_until_failed("b")
    decode.leader.cancel("b", "computed here")
    hand_over(source, decode, "next")


def test_a_prompt_that_the_prefill_engine_never_gets(pair: Pair) -> None:
    source, decode = pair()
    source.limits.meet_timeout_s = 0.1
    decode.leader.want("b", "nowhere", source.leader.address, PROMPT)
    assert "engine was not given prompt nowhere within 0.1 s (limits.meet_timeout_s)" in decode.wait_until_failed("b")
    source.limits.meet_timeout_s = TIMEOUT_S
    decode.leader.bind("b", [TO])  # an engine that would rather fail it than compute it
    assert "was not given prompt nowhere" in decode.settled("b").failure
    assert source.outcomes("prefill") == {"refused": 1} and decode.outcomes("decode") == {"refused": 1}
    hand_over(source, decode, "next")
    wait_for(lambda: decode.outcomes("decode") == {"refused": 1, "done": 1}, "each prompt is counted once")


@pytest.mark.parametrize(
    ("theirs", "said"),
    [((*PROMPT[:-1], 5), r"token_ids\[99\] is 5"), (PROMPT[:-1], "token_ids has 99 tokens; the prompt .* has 100")],
)
def test_another_prompt_under_the_same_id_is_refused(pair: Pair, theirs: tuple[int, ...], said: str) -> None:
    source, decode = pair()
    source.leader.offer("a", "t", PROMPT)
    source.leader.begin("a")
    decode.leader.want("b", "t", source.leader.address, theirs)
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(decode.wait_until_failed("b"))
    source.compute("a", FROM, PROMPT, 0, 100)
    source.finish("a")
    source.freed("a")


def test_the_decode_side_goes_away(pair: Pair, start: Start) -> None:
    source, decode = pair()
    begun(source, decode)
    source.sends("computed", "u")
    decode.leader.want("without pages", "u", source.leader.address, PROMPT)
    decode.wait_until_ready("without pages")
    source.limits.hold_s = 0.1
    decode.close()
    wait_for(lambda: source.leader.num_joined == 0, "the loss is seen")
    source.compute("a", FROM, PROMPT, 40, 100)
    source.finish("a")
    assert source.freed("a").failure and source.freed("computed").failure
    source.assert_idle()
    source.limits.hold_s = TIMEOUT_S
    another = start(DECODE, settings={"peers.prefill_nodes": (source.leader.address,)})
    wait_for(another.joined, "joined")
    hand_over(source, another, "next")


def test_a_prefill_node_that_nobody_has_set(pair: Pair) -> None:
    source, decode = pair()
    decode.leader.want("b", "t", "127.0.0.1:9", PROMPT)
    assert "127.0.0.1:9, which is not in peers.prefill_nodes" in decode.wait_until_failed("b")
    decode.leader.cancel("b", "computed here")
    hand_over(source, decode, "next")


def test_two_instances_of_one_name(start: Start) -> None:
    name = f"the-same-{os.getpid()}"  # other test runs on this machine use other names
    start(PREFILL, name=name)
    with pytest.raises(ConfigError, match=f"instance '{name}' already has a leader"):
        start(PREFILL, name=name)


@pytest.mark.parametrize(
    ("hellos", "refusal"),
    [
        ((), r"ranks \[0, 1\] of the engine have not connected within 0.2 s"),
        ((hello(0), hello(1, pool_pages=9)), "ranks 0 and 1 have 8 and 9 pages"),
    ],
    ids=["absent", "unlike"],
)
def test_an_instance_without_a_group_of_ranks_does_not_start(
    monkeypatch: pytest.MonkeyPatch, hellos: tuple[RankReady, ...], refusal: str
) -> None:
    def watch(link: LeaderLink, loop: object, on_message: Callable[[int, RankReady], None]) -> None:
        for one in hellos:
            on_message(one.rank, one)

    monkeypatch.setattr(LeaderLink, "watch", watch)
    leader = ConnectorLeader(ConnectorConfig(tls={"insecure": 1}), instance="alone", num_ranks=2, sides=PREFILL)  # type: ignore[arg-type]
    try:
        with pytest.raises(TransferError, match=refusal):
            leader.start(timeout_s=0.2)
    finally:
        leader.close()


async def test_a_decode_side_whose_start_fails_ends_its_discovery(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ConfigError("refused")

    monkeypatch.setattr(decode_service, "PrefillNodes", refuse)
    config = load_config(ConnectorConfig, flags={"tls.insecure": 1, "discovery.file": str(tmp_path / "nodes.yaml")})
    side = decode_service.DecodeService(
        node=cast(Any, None),
        config=config,
        hellos=(hello(0),),
        security=PlainText(),
        broadcast=lambda message: None,
        reports=lambda: (),
    )
    with pytest.raises(ConfigError, match="refused"):
        side.start("127.0.0.1:1")
    assert len(asyncio.all_tasks()) == 2, "it follows the file"
    await side.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}


NO_UTF8 = "t\ud800"  # half of a surrogate pair, as a JSON body can name it; gRPC carries UTF-8 only


def assert_not_broken(decode: Instance) -> None:
    """The engine's next call raises nothing, also once every task that ended has been looked at."""
    gc.collect()  # an exception that nobody has taken is reported when its task is collected
    wait_for(lambda: decode.leader.is_idle, "idle")
    decode.leader.check()


def test_a_transfer_id_that_is_no_utf8_ends_its_own_prompt_only(pair: Pair) -> None:
    source, decode = pair()
    decode.leader.want("b", NO_UTF8, source.leader.address, PROMPT)
    assert decode.wait_until_failed("b") == r"the prompt's transfer_id is 't\ud800'; it must be text that UTF-8 can carry"
    decode.leader.cancel("b", "computed here")
    assert_not_broken(decode)
    hand_over(source, decode, "next")
    assert decode.outcomes("decode") == {"aborted": 1, "done": 1}, "nobody else is to blame: no breaker hears of it"
    decode.leader.decline(NO_UTF8, source.leader.address, "its client went away")
    hand_over(source, decode, "after it was declined")
    assert_not_broken(decode)
