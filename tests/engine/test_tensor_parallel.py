"""Several ranks in real processes: same tokens, each pool only its own heads, and a lost peer is noticed."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from embedded_engine.engine import EmbeddedEngine
from tests.engine.conftest import Generate
from tests.engine.steps import bind_pages, decode_all, prefill_all
from transfer.engine_types import DecodeItem, PrefillItem, SamplingParams
from transfer.errors import ConfigError, EngineError
from transfer.layout import Shard

NUM_TOKENS = 8
START_S = 60.0
ANSWER_S = 60.0
FROZEN_TIMEOUT_S = 3.0


class Ranks:
    """All ranks of a group, driven in step: what a node's leader does. Looks like an engine to `steps`."""

    def __init__(self, directory: Path, group: str, size: int) -> None:
        self.connections = [_connect(directory / f"{group}-{rank}") for rank in range(size)]
        self.pids = [_peer_pid(connection) for connection in self.connections]
        self.num_killed = 0

    def send(self, rank: int, method: str, *arguments: Any) -> None:
        self.connections[rank].send((method, arguments))

    def answer(self, rank: int, wait_s: float = ANSWER_S) -> tuple[bool, Any]:
        assert self.connections[rank].poll(wait_s), f"rank {rank} gave no answer within {wait_s} s"
        answer: tuple[bool, Any] = self.connections[rank].recv()
        return answer

    def call(self, method: str, *arguments: Any) -> list[Any]:
        for rank in range(len(self.connections)):
            self.send(rank, method, *arguments)
        answers = [self.answer(rank) for rank in range(len(self.connections))]
        assert all(is_ok for is_ok, _ in answers), answers
        return [result for _, result in answers]

    def prefill(self, items: list[PrefillItem]) -> dict[str, int]:
        return self._leader("prefill", items)

    def decode(self, items: list[DecodeItem]) -> dict[str, int]:
        return self._leader("decode", items)

    def _leader(self, method: str, items: list[Any]) -> dict[str, int]:
        first, *others = self.call(method, items)
        assert all(other == {} for other in others), "only rank 0 samples"
        tokens: dict[str, int] = first
        return tokens

    def kill(self, rank: int) -> None:
        os.kill(self.pids[rank], signal.SIGKILL)
        self.num_killed += 1

    def hang_up(self) -> None:
        for connection in self.connections:
            connection.close()


def _connect(path: Path) -> Connection:
    deadline = time.monotonic() + START_S
    while True:
        try:
            return Client(str(path), family="AF_UNIX")
        except (FileNotFoundError, ConnectionRefusedError):
            assert time.monotonic() < deadline, f"no rank at {path}"
            time.sleep(0.05)


def _peer_pid(connection: Connection) -> int:
    with socket.socket(fileno=os.dup(connection.fileno())) as peer:
        return int(struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])


@pytest.fixture(scope="module")
def groups(demo_dir: Path, qwen_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Ranks]]:
    directory = tmp_path_factory.mktemp("ranks")
    sizes = {"two": 2, "three": 3, "killed": 2, "frozen": 2, "qwen": 2, "callback": 2, "leaving": 3}
    timeouts_s = {"frozen": FROZEN_TIMEOUT_S, "callback": FROZEN_TIMEOUT_S}
    described = [
        f"{group}:{size}:{timeouts_s.get(group, 30.0)}:{qwen_dir if group == 'qwen' else demo_dir}"
        for group, size in sizes.items()
    ]
    script = Path(__file__).with_name("rank_process.py")
    process = subprocess.Popen([sys.executable, str(script), str(directory), *described], stdout=subprocess.PIPE, text=True)
    ranks: dict[str, Ranks] = {}
    try:
        for group, size in sizes.items():
            ranks[group] = Ranks(directory, group, size)
        yield ranks
        for group in ranks.values():
            group.hang_up()
        # Every rank that no test has killed ends by itself and in order, whether or not it was closed.
        output, _ = process.communicate(timeout=30)
        num_killed = sum(group.num_killed for group in ranks.values())
        assert output.strip() == str([-9] * num_killed + [0] * (sum(sizes.values()) - num_killed))
    finally:
        for pid in (pid for group in ranks.values() for pid in group.pids):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        process.kill()
        process.wait(timeout=30)


@pytest.mark.parametrize("group", ["two", "three"])
def test_tokens_are_those_of_one_rank(
    groups: dict[str, Ranks], demo_dir: Path, generate: Generate, prompts: dict[int, tuple[int, ...]], group: str
) -> None:
    ranks = groups[group]
    chosen = {str(length): prompts[length] for length in (1, 17, 129, 257)}
    lengths = {name: len(tokens) for name, tokens in chosen.items()}
    tables = bind_pages(200, 16, {name: length + NUM_TOKENS for name, length in lengths.items()})
    first = prefill_all(ranks, chosen, tables, chunk_tokens=100)
    tokens = decode_all(ranks, first, lengths, tables, NUM_TOKENS)
    assert tokens == {name: generate(demo_dir, own, NUM_TOKENS) for name, own in chosen.items()}


@pytest.mark.parametrize("group", ["two", "three"])
def test_each_pool_holds_its_own_heads_and_no_others(
    groups: dict[str, Ranks], demo_dir: Path, prompts: dict[int, tuple[int, ...]], group: str
) -> None:
    """The ranks' K and V beside each other are those of a whole model; that is also a hand-over TP n -> TP 1."""
    ranks, size = groups[group], len(groups[group].connections)
    item = PrefillItem(request_id="a", token_ids=prompts[64], first_token=0, page_tables=([7, 3, 9, 1],), is_last=True)
    whole = EmbeddedEngine(demo_dir, shard=Shard(), num_pages=10)
    assert ranks.prefill([item]) == whole.prefill([item])
    slots = [page * 16 + offset for page in item.page_table for offset in range(16)]
    parts = ranks.call("dump", slots)
    for layer in range(8):
        for index, expected in enumerate(whole.pool.read(layer, torch.tensor(slots))):
            joined = torch.cat([torch.from_numpy(part[layer][index]) for part in parts], dim=1)
            assert parts[0][layer][index].shape == (64, 12 // size, 32)
            torch.testing.assert_close(joined, expected, atol=2e-3, rtol=1e-3)
    about = ranks.call("about")
    assert all(one["shape"] == (200, 16, 12 // size, 32) and one["fields"] == whole.model_fields for one in about)
    assert all(one["calls"][-4:] == [2, 4, 6, 8] for one in about)


def test_qwen3_with_tied_embeddings_and_biases(
    groups: dict[str, Ranks], qwen_dir: Path, generate: Generate, prompts: dict[int, tuple[int, ...]]
) -> None:
    chosen = {str(length): prompts[length] for length in (2, 33, 129)}
    lengths = {name: len(tokens) for name, tokens in chosen.items()}
    tables = bind_pages(200, 16, {name: length + NUM_TOKENS for name, length in lengths.items()})
    first = prefill_all(groups["qwen"], chosen, tables, chunk_tokens=64)
    tokens = decode_all(groups["qwen"], first, lengths, tables, NUM_TOKENS)
    assert tokens == {name: generate(qwen_dir, own, NUM_TOKENS) for name, own in chosen.items()}


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


def test_a_wrong_item_is_refused_on_every_rank_and_harms_nothing(
    groups: dict[str, Ranks], prompts: dict[int, tuple[int, ...]]
) -> None:
    ranks = groups["two"]
    wrong = PrefillItem(request_id="a", token_ids=(1_000_000,), first_token=0, page_tables=([0],), is_last=True)
    for rank in range(2):
        ranks.send(rank, "prefill", [wrong])
    for rank in range(2):
        is_ok, text = ranks.answer(rank)
        assert not is_ok and "1000000" in text
    right = PrefillItem(request_id="a", token_ids=prompts[5], first_token=0, page_tables=([0],), is_last=True)
    assert set(ranks.prefill([right])) == {"a"}


def test_a_killed_peer_is_an_engine_error_at_once(groups: dict[str, Ranks], prompts: dict[int, tuple[int, ...]]) -> None:
    ranks = groups["killed"]
    item = PrefillItem(request_id="a", token_ids=prompts[5], first_token=0, page_tables=([0],), is_last=True)
    ranks.prefill([item])
    ranks.send(0, "prefill", [item])  # waits inside the step for its peer
    time.sleep(0.2)
    ranks.kill(1)
    is_ok, text = ranks.answer(0, 5.0)
    assert not is_ok and text.startswith("EngineError: the step failed on rank 0 of 2") and "\n" not in text
    ranks.send(0, "decode", [DecodeItem(request_id="a", token_id=5, position=5, page_tables=([0],))])
    is_ok, text = ranks.answer(0, 2.0)
    assert not is_ok and "must be restarted" in text
    ranks.send(0, "close")
    assert ranks.answer(0, 5.0) == (True, None)


def test_a_frozen_peer_is_an_engine_error_within_the_deadline(
    groups: dict[str, Ranks], prompts: dict[int, tuple[int, ...]]
) -> None:
    ranks = groups["frozen"]
    item = PrefillItem(request_id="a", token_ids=prompts[5], first_token=0, page_tables=([0],), is_last=True)
    ranks.prefill([item])
    os.kill(ranks.pids[1], signal.SIGSTOP)
    begin = time.monotonic()
    ranks.send(0, "prefill", [item])
    is_ok, text = ranks.answer(0, FROZEN_TIMEOUT_S + 10)
    assert not is_ok and text.startswith("EngineError: the step failed on rank 0 of 2")
    assert FROZEN_TIMEOUT_S * 0.8 < time.monotonic() - begin < FROZEN_TIMEOUT_S + 5
    ranks.kill(1)
    ranks.send(0, "close")
    assert ranks.answer(0, 5.0) == (True, None)


def test_a_callback_that_fails_on_one_rank_ends_the_group(groups: dict[str, Ranks], prompts: dict[int, tuple[int, ...]]) -> None:
    ranks = groups["callback"]
    item = PrefillItem(request_id="a", token_ids=prompts[5], first_token=0, page_tables=([0],), is_last=True)
    ranks.send(0, "prefill_broken_callback", [item])
    ranks.send(1, "prefill", [item])
    is_ok, text = ranks.answer(0)
    assert not is_ok and text == "ValueError: the callback failed"
    is_ok, text = ranks.answer(1, FROZEN_TIMEOUT_S + 10)
    assert not is_ok and text.startswith("EngineError")
    for rank in range(2):
        ranks.send(rank, "prefill", [item])
        is_ok, text = ranks.answer(rank)
        assert not is_ok and "must be restarted" in text


def test_ranks_leave_in_any_order(groups: dict[str, Ranks]) -> None:
    """One after another; those of "two" and "three" are left to the end of their processes."""
    for rank in (1, 0, 2):
        groups["leaving"].send(rank, "close")
        assert groups["leaving"].answer(rank, 5.0) == (True, None)


def test_joining_fails_in_bounded_time_and_says_where(tmp_path: Path) -> None:
    from embedded_engine.tensor_parallel import init_distributed

    store = f"file://{tmp_path / 'store'}"
    with ThreadPoolExecutor(1) as executor:
        joining = executor.submit(init_distributed, 0, 2, store, timeout_s=1.0)
        with pytest.raises(EngineError, match=f"rank 0 of 2 did not meet the others at {store}"):
            joining.result(timeout=20)


@pytest.mark.parametrize(
    ("arguments", "options", "named"),
    [
        ((0, 1, "file:///x"), {}, "rank is 0 of 1"),
        ((2, 2, "file:///x"), {}, "rank is 2 of 2"),
        ((0, 2, "http://x"), {}, "init_method is 'http://x'"),
        ((0, 2, "file:///x"), {"timeout_s": 0}, "timeout_s is 0"),
    ],
)
def test_wrong_settings_of_a_group(arguments: tuple[int, int, str], options: dict[str, Any], named: str) -> None:
    from embedded_engine.tensor_parallel import init_distributed

    with pytest.raises(ConfigError, match=named):
        init_distributed(*arguments, **options)
