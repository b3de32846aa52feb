"""What goes wrong between two engines with a hosted kvferry: told to both, used by neither, and nothing is left of it."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence

import pytest

from decode_node import target_requests
from decode_node.prefill_peer import PrefillPeer
from decode_node.target_requests import PromptState
from kvferry.engines.hosted import SOURCE, TARGET
from prefill_node import source_requests
from tests.hosted.conftest import Start
from tests.hosted.instances import FROM, PROMPT, TO, Instance, hand_over, on_loop, wait_for
from transfer.errors import ConfigError, PeerUnreachable

Pair = Callable[..., tuple[Instance, Instance]]


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


def test_a_prefill_side_that_is_not_reached_is_told_later(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    source, decode = pair()
    stub = PrefillPeer.stub
    cut = [True]

    async def stub_if_reached(peer: PrefillPeer) -> object:
        if cut:
            raise PeerUnreachable("the network is cut")
        return await stub(peer)

    monkeypatch.setattr(PrefillPeer, "stub", stub_if_reached)
    source.sends("a", "t")
    decode.leader.decline("t", source.leader.address, "its client went away")
    time.sleep(0.3)
    source.take_news()
    assert source.news == [[]]
    cut.clear()
    assert "its client went away" in source.freed("a").failure


def test_a_prompt_that_is_given_up_before_it_has_pages_is_heard_of_no_more(pair: Pair) -> None:
    source, decode = pair()
    decode.leader.want("b", "t", source.leader.address, PROMPT)
    decode.leader.cancel("b", "its client went away")
    wait_for(lambda: decode.leader.view("b") is None, "the prompt is forgotten")
    hand_over(source, decode, "next")
    assert [news.name for news in decode.news[0]] == ["next"]


def test_nobody_asks_for_a_computed_prompt(pair: Pair) -> None:
    source, decode = pair({"tp_size": 2, "settings": {"limits.hold_s": 2.0}})
    source.sends("a", "t")
    assert source.freed("a").failure == "no decode side has asked for it within 2 s (limits.hold_s)"
    decode.leader.want("b", "t", source.leader.address, PROMPT)
    assert "prompt t is over: no decode side has asked for it" in decode.wait_until_failed("b")
    decode.leader.cancel("b", "computed here")
    hand_over(source, decode, "next")


def test_a_prompt_that_the_prefill_engine_never_gets(pair: Pair) -> None:
    source, decode = pair({"settings": {"limits.meet_timeout_s": 2.0}})
    decode.leader.want("b", "nowhere", source.leader.address, PROMPT)
    assert "engine was not given prompt nowhere within 2 s (limits.meet_timeout_s)" in decode.wait_until_failed("b")
    decode.leader.bind("b", [TO])  # an engine that would rather fail it than compute it
    assert "was not given prompt nowhere" in decode.settled("b").failure
    assert source.outcomes("prefill") == {"refused": 1} and decode.outcomes("decode") == {"refused": 1}
    hand_over(source, decode, "next")
    wait_for(lambda: decode.outcomes("decode") == {"refused": 1, "done": 1}, "each prompt is counted once")


def test_a_prompt_that_the_prefill_side_turns_away_is_counted_on_both(pair: Pair) -> None:
    source, decode = pair()
    decode.leader.want("b", "t", source.leader.address, (*PROMPT, 1_000_000))  # a token that the model does not have
    decode.wait_until_failed("b")
    decode.leader.cancel("b", "computed here")
    wait_for(lambda: decode.leader.view("b") is None, "forgotten")
    assert source.outcomes("prefill") == {"refused": 1} and decode.outcomes("decode") == {"failed": 1}
    hand_over(source, decode, "next")


def test_a_prefill_node_that_is_not_there_in_time_fails_its_prompts(pair: Pair) -> None:
    """It is somebody's fault, and no want of room."""
    source, decode = pair({}, {"limits.meet_timeout_s": 0.2, "join_on_request": True})
    decode.leader.want("b", "t", "127.0.0.1:9", PROMPT)
    decode.wait_until_failed("b")
    assert decode.outcomes("decode") == {"failed": 1}
    decode.leader.cancel("b", "computed here")
    hand_over(source, decode, "next")


@pytest.mark.parametrize(
    ("theirs", "said"),
    [((*PROMPT[:-1], 5), r"token_ids\[99\] is 5"), (PROMPT[:-1], "token_ids has 99 tokens; the prompt .* has 100")],
)
def test_another_prompt_under_the_same_id_is_refused(pair: Pair, theirs: tuple[int, ...], said: str) -> None:
    source, decode = pair({"settings": {"limits.hold_s": 2.0}})
    source.leader.offer("a", "t", PROMPT)
    source.leader.begin("a")
    decode.leader.want("b", "t", source.leader.address, theirs)
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(decode.wait_until_failed("b"))
    source.compute("a", FROM, PROMPT, 0, 100)
    source.finish("a")
    source.freed("a")


def preempt(source: Instance) -> None:
    """The engine takes the pages of "a" back."""
    source.leader.pause("a")
    for rank in source.ranks:
        rank.pause(["a"], "preempted")


def next_try(source: Instance, before: Sequence[str]) -> str | None:
    """Of "a", once every rank knows of it: one that does not has nothing to end when the prompt is preempted, and goes on."""
    tries = [name for name in source.leader.source.requests.request_ids if name not in before]
    return tries[0] if tries and all(rank.num_transfers for rank in source.ranks) else None


def test_pages_of_a_preempted_prompt_stay_where_nobody_needs_them(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where others do, they are given: `tests.hosted.test_vllm_sides.test_blocks_that_are_lacking_come_from_a_request_...`."""
    monkeypatch.setattr(target_requests, "YIELD_AFTER_S", 0.2)
    source, decode = pair({"tp_size": 2})
    begun(source, decode, num_computed=64)
    preempt(source)
    time.sleep(0.5)
    decode.take_news()
    assert decode.news == [[]]
    source.leader.begin("a")
    source.compute("a", FROM, PROMPT, 0, 100)
    source.finish("a")
    assert decode.settled("b").failure == ""
    decode.assert_has(TO, PROMPT)
    assert source.freed("a").failure == ""


def test_pages_are_not_given_to_a_prompt_that_is_preempted_as_well(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """It pins nothing any more, and waits like the other."""
    monkeypatch.setattr(target_requests, "YIELD_AFTER_S", 0.2)
    source, decode = pair({"tp_size": 2})
    begun(source, decode, num_computed=64)
    decode.leader.want("d", "c", source.leader.address, PROMPT)
    source.leader.offer("c", "c", PROMPT)
    source.leader.begin("c")
    decode.wait_until_ready("d")
    preempt(source)
    source.leader.pause("c")
    for rank in source.ranks:
        rank.pause(["c"], "preempted")

    def is_waiting() -> bool:
        view = decode.leader.view("d")
        return view is not None and view.state is PromptState.WAITING

    wait_for(is_waiting, "d is not ready any more")
    for _ in range(25):
        decode.leader.lacks_pages("d")
        time.sleep(0.02)
    decode.take_news()
    assert decode.news == [[]]
    for name, pages in (("c", list(range(30, 37))), ("a", FROM)):
        source.leader.begin(name)
        source.compute(name, pages, PROMPT, 0, 100)
        source.finish(name)
    decode.wait_until_ready("d")
    decode.leader.bind("d", [list(range(7))])
    assert decode.settled("b").failure == decode.settled("d").failure == ""
    decode.assert_has(TO, PROMPT)
    decode.assert_has(list(range(7)), PROMPT)


def test_pages_that_lacked_once_do_not_lack_for_long(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_requests, "YIELD_AFTER_S", 0.2)
    monkeypatch.setattr(target_requests, "LACKING_GAP_S", 0.05)
    source, decode = pair({"tp_size": 2})
    begun(source, decode, num_computed=64)
    preempt(source)
    source.leader.offer("c", "c", PROMPT)
    source.leader.begin("c")
    decode.leader.want("d", "c", source.leader.address, PROMPT)
    decode.wait_until_ready("d")
    for _ in range(3):
        decode.leader.lacks_pages("d")
        time.sleep(0.25)
    decode.take_news()
    assert decode.news == [[]]


def test_pages_of_a_prompt_that_is_about_to_be_sent_are_not_given(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has been bound just now, and prefill is between two questions for room."""
    monkeypatch.setattr(target_requests, "YIELD_AFTER_S", 0.0)
    monkeypatch.setattr(target_requests, "BIND_WAIT_S", 0.01)
    monkeypatch.setattr(source_requests, "RETRY_RESERVE_S", 0.3)
    source, decode = pair({"tp_size": 2})
    for name, pages in (("a", FROM), ("c", list(range(30, 37)))):
        source.sends(name, name, pages=pages)
        decode.leader.want(name, name, source.leader.address, PROMPT)
        decode.wait_until_ready(name)
    time.sleep(0.1)
    decode.leader.bind("a", [TO])
    for _ in range(50):
        decode.leader.lacks_pages("c")
        time.sleep(0.01)
    assert decode.settled("a").failure == ""
    decode.leader.bind("c", [TO])
    assert decode.settled("c").failure == ""
    decode.assert_has(TO, PROMPT)


@pytest.mark.parametrize("told_by", ["leader", "ranks"])
def test_a_prompt_is_preempted_as_often_as_it_happens(pair: Pair, monkeypatch: pytest.MonkeyPatch, told_by: str) -> None:
    """It is no retry, of which there are none here, and nothing that speaks against the prefill node."""
    monkeypatch.setattr(target_requests, "REASON_GRACE_S", 30.0)  # however slow the machine: prefill's reason counts
    source, decode = pair({"tp_size": 2}, {"limits.prefill_retries": 0, "breaker.failures": 1})
    begun(source, decode, num_computed=64)
    tries = [wait_for(lambda: next_try(source, []), "the first try")]
    for number in range(5):
        if told_by == "leader":
            source.leader.pause("a")
        for rank in source.ranks:
            rank.pause(["a"], "preempted")
        source.leader.begin("a")
        source.compute("a", list(range(7 * number, 7 * number + 7)), PROMPT, 0, 40 + number)
        tries.append(wait_for(lambda: next_try(source, tries), "the next try"))
    assert len(set(tries)) == 6
    source.compute("a", list(range(28, 35)), PROMPT, 0, 100)
    source.finish("a")
    assert decode.settled("b").failure == ""
    decode.assert_has(TO, PROMPT)
    assert source.freed("a").failure == ""
    (peer,) = decode.leader.target.peers.peers
    assert peer.breaker.num_openings == 0


def test_a_prompt_that_is_preempted_after_all_of_it_was_sent_is_over(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the engine goes on to generate: what it computes again nobody needs, and nothing waits for `limits.hold_s`."""
    source, decode = pair({"tp_size": 2})
    requests, sent_by = source.leader.source.requests, []
    on_sent = requests.on_sent
    monkeypatch.setattr(requests, "on_sent", lambda rank, message: (on_sent(rank, message), sent_by.append(rank)))
    begun(source, decode, num_computed=100)
    assert decode.settled("b").failure == ""
    wait_for(lambda: len(sent_by) == 2, "prefill has heard so")
    preempt(source)
    source.leader.begin("a")
    source.compute("a", FROM, PROMPT, 0, 100)
    source.finish("a")
    assert source.freed("a").failure == ""
    source.assert_idle()
    hand_over(source, decode, "next")


def test_a_call_that_is_lost_when_all_has_come_leaves_nothing(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prefill side has not heard yet that it was whole; it will not be asked again, and hears that."""
    source, decode = pair({"tp_size": 2})
    requests = source.leader.source.requests
    monkeypatch.setattr(requests, "on_sent", lambda *_: None)  # it never finds out by itself
    begun(source, decode, num_computed=100)
    assert decode.settled("b").failure == ""
    source.finish("a")
    (transfer_id,) = requests.request_ids
    on_loop(requests.abort, transfer_id, PeerUnreachable("the link is lost"))
    assert source.freed("a").failure == "the decode side has all of it"


def test_the_decode_side_goes_away(pair: Pair, start: Start) -> None:
    source, decode = pair({"settings": {"limits.hold_s": 2.0}})
    begun(source, decode)
    decode.close()
    wait_for(lambda: source.leader.num_joined == 0, "the loss is seen")
    source.compute("a", FROM, PROMPT, 40, 100)
    source.finish("a")
    assert source.freed("a").failure
    source.assert_idle()
    another = start(TARGET, settings={"peers.prefill_nodes": (source.leader.address,)})
    wait_for(another.joined, "joined")
    hand_over(source, another, "next")


def test_a_prefill_node_that_nobody_has_set(pair: Pair) -> None:
    source, decode = pair()
    decode.leader.want("b", "t", "127.0.0.1:9", PROMPT)
    assert "127.0.0.1:9, which is not in peers.prefill_nodes" in decode.wait_until_failed("b")
    decode.leader.cancel("b", "computed here")
    hand_over(source, decode, "next")


def test_two_instances_of_one_name(start: Start) -> None:
    start(SOURCE, name="the-same")
    with pytest.raises(ConfigError, match="instance 'the-same' has a leader already"):
        start(SOURCE, name="the-same")


def test_a_rank_that_does_not_come_is_named() -> None:
    from kvferry.engines.hosted_leader import HostedLeader
    from transfer.config import HostedConfig

    leader = HostedLeader(HostedConfig(tls={"insecure": 1}), instance="alone", num_ranks=2, sides=SOURCE)  # type: ignore[arg-type]
    try:
        with pytest.raises(ConfigError, match=r"ranks \[0, 1\] of the engine have not come within 0.2 s"):
            leader.start(timeout_s=0.2)
    finally:
        leader.close()


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


def test_an_unexpected_fault_while_a_prefill_side_is_told_ends_nothing(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    source, decode = pair()
    told: list[str] = []

    async def stub(peer: PrefillPeer) -> object:
        told.append(peer.address)
        raise RuntimeError("a bug")

    with monkeypatch.context() as broken:
        broken.setattr(PrefillPeer, "stub", stub)
        decode.leader.decline("t", source.leader.address, "its client went away")
        wait_for(lambda: told or None, "the prefill side is notified")
    hand_over(source, decode, "next")
    assert_not_broken(decode)
