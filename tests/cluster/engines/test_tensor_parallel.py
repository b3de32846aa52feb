"""Several ranks in real processes: host memory, sampling, and lost peers; tokens in the test of families."""

from __future__ import annotations

from pathlib import Path

import pytest

from embedded_engine.engine import EmbeddedEngine
from tests.cluster.engines.ranks import GroupOfRanks, Ranks, RankServer
from tests.embedded_engine.conftest import Generate
from tests.embedded_engine.steps import bind_pages, decode_ahead, decode_all, prefill_all
from transfer.engine_types import DecodeItem, PrefillItem, SamplingParams
from transfer.layer_groups import NO_PAGE
from transfer.layout import Shard

NUM_TOKENS = 8
FROZEN_TIMEOUT_S = 3.0


@pytest.fixture(scope="module")
def groups(demo_dir: Path, rank_server: RankServer) -> dict[str, Ranks]:
    sizes = {"two": 2, "killed": 2, "frozen": 2, "callback": 2, "tiered": 2}
    timeouts_s = {"frozen": FROZEN_TIMEOUT_S, "callback": FROZEN_TIMEOUT_S}
    described = {
        group: GroupOfRanks(size=size, model=demo_dir, timeout_s=timeouts_s.get(group, 30.0)) for group, size in sizes.items()
    }
    return rank_server.start(described)


def test_tokens_over_host_memory_are_those_of_one_rank(
    groups: dict[str, Ranks], demo_dir: Path, generate: Generate, prompts: dict[int, tuple[int, ...]]
) -> None:
    """Each rank has its own heads' pages in its own host memory, under the same numbers."""
    ranks = groups["tiered"]
    chosen = {str(length): prompts[length] for length in (5, 129, 257)}
    lengths = {name: len(tokens) for name, tokens in chosen.items()}
    tables = bind_pages(200, 16, {name: length + NUM_TOKENS for name, length in lengths.items()})
    first = prefill_all(ranks, chosen, tables)
    hosts = {"5": (), "129": tuple(range(30, 34)), "257": tuple(range(16))}  # nothing, the half, all but the newest page
    ranks.call("move_to_host", 34, [(tables[name][: len(host)], list(host)) for name, host in hosts.items() if host])
    tokens = {name: [token] for name, token in first.items()}
    for step in range(NUM_TOKENS - 1):
        items = [
            DecodeItem(
                request_id=name,
                token_id=own[-1],
                position=lengths[name] + step,
                page_tables=([NO_PAGE] * len(hosts[name]) + tables[name][len(hosts[name]) :],),
                host_tables=(hosts[name],),
            )
            for name, own in tokens.items()
        ]
        for name, token in ranks.decode(items).items():
            tokens[name].append(token)
    assert tokens == {name: generate(demo_dir, own, NUM_TOKENS) for name, own in chosen.items()}


def test_seeded_sampling_does_not_depend_on_the_cut(
    groups: dict[str, Ranks], demo_dir: Path, prompts: dict[int, tuple[int, ...]]
) -> None:
    sampling = SamplingParams(temperature=1.0, top_p=0.95, top_k=50, seed=3)
    tables, lengths = {"a": list(range(10))}, {"a": 33}
    found = []
    for engine in (groups["two"], EmbeddedEngine(demo_dir, shard=Shard(), num_pages=10)):
        first = prefill_all(engine, {"a": prompts[33]}, tables, sampling=sampling)
        found.append(decode_all(engine, first, lengths, tables, NUM_TOKENS, sampling=sampling))
    assert found[0] == found[1]


def test_every_rank_uses_tokens_that_the_host_has_not_read(
    groups: dict[str, Ranks], demo_dir: Path, generate: Generate, prompts: dict[int, tuple[int, ...]]
) -> None:
    chosen = {str(length): prompts[length] for length in (5, 129)}
    lengths = {name: len(tokens) for name, tokens in chosen.items()}
    tables = bind_pages(200, 16, {name: length + NUM_TOKENS for name, length in lengths.items()})
    first = prefill_all(groups["two"], chosen, tables)
    found = decode_ahead(groups["two"], first, lengths, tables, NUM_TOKENS)
    assert found == {name: generate(demo_dir, own, NUM_TOKENS) for name, own in chosen.items()}


def test_a_killed_peer_is_an_engine_error_at_once(groups: dict[str, Ranks], prompts: dict[int, tuple[int, ...]]) -> None:
    ranks = groups["killed"]
    item = PrefillItem(request_id="a", token_ids=prompts[5], first_token=0, page_tables=([0],), is_last=True)
    ranks.prefill([item])
    ranks.send(0, "prefill", [item])  # may wait inside the step for its peer by now
    ranks.kill(1)
    is_ok, text = ranks.answer(0)
    assert not is_ok and text.startswith("EngineError: the step failed on rank 0 of 2") and "\n" not in text
    ranks.send(0, "decode", [DecodeItem(request_id="a", token_id=5, position=5, page_tables=([0],))])
    is_ok, text = ranks.answer(0)
    assert not is_ok and "must be restarted" in text
    ranks.send(0, "close")
    assert ranks.answer(0) == (True, None)


def test_a_frozen_peer_is_an_engine_error_within_the_deadline(
    groups: dict[str, Ranks], prompts: dict[int, tuple[int, ...]]
) -> None:
    ranks = groups["frozen"]
    item = PrefillItem(request_id="a", token_ids=prompts[5], first_token=0, page_tables=([0],), is_last=True)
    ranks.prefill([item])
    ranks.freeze(1)
    ranks.send(0, "prefill", [item])
    is_ok, text = ranks.answer(0)
    assert not is_ok and text.startswith("EngineError: the step failed on rank 0 of 2")
    ranks.kill(1)
    ranks.send(0, "close")
    assert ranks.answer(0) == (True, None)


def test_a_callback_that_fails_on_one_rank_ends_the_group(groups: dict[str, Ranks], prompts: dict[int, tuple[int, ...]]) -> None:
    ranks = groups["callback"]
    item = PrefillItem(request_id="a", token_ids=prompts[5], first_token=0, page_tables=([0],), is_last=True)
    ranks.send(0, "prefill_broken_callback", [item])
    ranks.send(1, "prefill", [item])
    is_ok, text = ranks.answer(0)
    assert not is_ok and text == "ValueError: the callback failed"
    is_ok, text = ranks.answer(1)
    assert not is_ok and text.startswith("EngineError")
    for rank in range(2):
        ranks.send(rank, "prefill", [item])
        is_ok, text = ranks.answer(rank)
        assert not is_ok and "must be restarted" in text
