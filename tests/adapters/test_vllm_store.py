"""Pages of a vLLM instance in a store, without vLLM: keys, lookups and jobs on a real directory, and on a store that fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvferry.engines import vllm_store
from kvferry.engines.vllm_store import FinishedJob, PageKeys, RankPages, VllmStore, fingerprint, rank_fields
from tests.adapters.vllm_memory import facts_of, ranks, recorded
from tests.storage.stores import BROKEN, MemoryStore, Seen, file_of
from transfer.config import StorageConfig
from transfer.errors import ConfigError, LayoutError
from transfer.storage.base import Store

CHUNK_BYTES, PAGE_BYTES, NUM_CHUNKS = 64, 60, 8
WAIT_S = 20.0
KEYS = PageKeys("0a" * 16, salt="")
MODEL = {"weights": "xxh3-128:1"}
CHUNKS = {"tokens_per_hash": 16, "blocks_per_chunk": 1, "groups": [[16, ["a"]]], "hash": "sha256"}


def name(page: int, group: int = 0) -> bytes:
    """vLLM's name of a page: a hash, and the group."""
    return page.to_bytes(32, "little") + group.to_bytes(4, "big")


class Instance:
    """A vLLM instance: its host memory and its store."""

    def __init__(self, config: StorageConfig, *, salt: str = "", begin: bool = True) -> None:
        self.memory = torch.zeros(NUM_CHUNKS, CHUNK_BYTES, dtype=torch.int8)
        self.seen = Seen()
        self.store = VllmStore(config, memory=memoryview(self.memory.numpy()), observer=self.seen)
        self._num_jobs = 0
        if begin:
            self.store.start(PageKeys(KEYS.fingerprint, salt), page_bytes=PAGE_BYTES)

    def fill(self, *pages: int) -> None:
        """Write each page into the chunk with its number, and other bytes after it in the chunk."""
        for page in pages:
            self.memory[page] = page + 1

    def save(self, *pages: int) -> FinishedJob:
        self._num_jobs += 1
        self.store.save(self._num_jobs, [name(page) for page in pages], pages)
        return self._job()

    def load(self, *pages: int) -> FinishedJob:
        self._num_jobs += 1
        self.store.load(self._num_jobs, [name(page) for page in pages], pages)
        return self._job()

    def look_up(self, *names: bytes, request_id: str = "r", positions: Sequence[int] | None = None) -> list[bool | None]:
        """Look up pages until all answers are known, as vLLM's scheduler does in each step."""
        places = range(1, len(names) + 1) if positions is None else positions
        deadline_s = time.monotonic() + WAIT_S
        while True:
            found = [
                self.store.is_stored(one, request_id, position=position) for one, position in zip(names, places, strict=True)
            ]
            if None not in found:
                return found
            assert time.monotonic() < deadline_s
            self.store.ask()
            time.sleep(0.001)

    def has(self, page: int) -> bool:
        """Whether host memory has the page."""
        return bool((self.memory[page, :PAGE_BYTES] == page + 1).all())

    def _job(self) -> FinishedJob:
        deadline_s = time.monotonic() + WAIT_S
        while not (jobs := self.store.finished()):
            assert time.monotonic() < deadline_s
            time.sleep(0.001)
        (job,) = jobs
        assert job.job_id == self._num_jobs
        return job


def num_outcomes(instance: Instance, op: str) -> int:
    return sum(len(outcomes) for called, outcomes in instance.seen.operations if called == op)


@pytest.fixture
def instance() -> Iterator[Callable[..., Instance]]:
    made: list[Instance] = []

    def make(store: Path | str, *, salt: str = "", begin: bool = True, **settings: Any) -> Instance:
        place = {"directory": store} if isinstance(store, Path) else {"url": store}
        made.append(Instance(StorageConfig(**place, **settings), salt=salt, begin=begin))
        return made[-1]

    yield make
    for one in made:
        one.store.close()


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryStore]:
    """A store in memory in place of the directory."""
    store = MemoryStore()

    def opened(config: StorageConfig) -> Store:
        return store

    monkeypatch.setattr("transfer.storage.open.open_store", opened)
    yield store
    store.gate.set()


@pytest.mark.parametrize("kind", ["directory", "objects"])
def test_pages_of_one_instance_are_loaded_by_another_one(instance: Callable[..., Instance], tmp_path: Path, kind: str) -> None:
    place = tmp_path if kind == "directory" else f"file://{tmp_path}"
    first, second = instance(place), instance(place)
    first.fill(0, 1, 2)
    job = first.save(0, 1, 2)
    assert (job.is_whole, job.is_load, job.names, job.num_bytes) == (True, False, tuple(map(name, range(3))), 3 * PAGE_BYTES)
    assert second.look_up(*map(name, range(4))) == [True, True, True, False]
    assert second.load(0, 1, 2).is_whole
    assert all(map(second.has, range(3)))
    assert not second.memory[:, PAGE_BYTES:].any()
    assert num_outcomes(second, "get") == 3


def test_salts_separate_instances(instance: Callable[..., Instance], tmp_path: Path) -> None:
    first, second = instance(tmp_path), instance(tmp_path, salt="b")
    first.fill(0)
    first.save(0)
    assert second.look_up(name(0)) == [False]


def test_after_a_reset_an_instance_has_its_own_new_pages_only(instance: Callable[..., Instance], tmp_path: Path) -> None:
    one, other = instance(tmp_path), instance(tmp_path)
    one.fill(0, 1)
    one.save(0)
    one.store.separate()
    assert one.look_up(name(0), name(1)) == [False, False]
    assert one.save(1).is_whole and one.load(1).is_whole
    assert other.look_up(name(1)) == [False]


def test_before_it_is_started_nothing_is_saved_or_found(instance: Callable[..., Instance], tmp_path: Path) -> None:
    one = instance(tmp_path, begin=False)
    assert one.look_up(name(0)) == [False]
    assert not one.save(0).is_whole
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


def test_a_long_prefix_is_found_with_few_lookups(instance: Callable[..., Instance], tmp_path: Path) -> None:
    one = instance(tmp_path)
    one.fill(*range(5))
    one.save(*range(5))
    num_pages = 1000
    found = one.look_up(*map(name, range(num_pages)))
    assert found == [page < 5 for page in range(num_pages)]
    assert num_outcomes(one, "exists") <= 14


def test_pages_of_a_window_are_looked_up_one_by_one(instance: Callable[..., Instance], tmp_path: Path) -> None:
    one = instance(tmp_path)
    one.fill(3, 4)
    one.save(3, 4)
    names = [name(page) for page in (4, 3, 2, 1)]
    assert one.look_up(*names, positions=[4, 3, 2, 1]) == [True, True, False, False]


def test_groups_are_looked_up_separately(instance: Callable[..., Instance], tmp_path: Path) -> None:
    one = instance(tmp_path)
    one.fill(0)
    one.save(0)
    assert one.look_up(name(0), name(0, group=1), name(1)) == [True, False, False]


def test_answers_are_kept_until_no_request_wants_them(instance: Callable[..., Instance], tmp_path: Path) -> None:
    one = instance(tmp_path)
    one.fill(0)
    assert one.look_up(name(0), request_id="a") == [False]
    assert one.look_up(name(0), request_id="b") == [False]
    one.save(0)
    one.store.forget("a")
    assert one.look_up(name(0), request_id="c") == [False]
    one.store.forget("b")
    one.store.forget("c")
    assert one.look_up(name(0), request_id="d") == [True]


@pytest.mark.parametrize("damage", BROKEN)
def test_a_damaged_page_is_not_loaded_and_counts_as_missing(
    instance: Callable[..., Instance], tmp_path: Path, damage: str
) -> None:
    one = instance(tmp_path)
    one.fill(0, 1, 2)
    one.save(0, 1, 2)
    file = file_of(tmp_path, KEYS.key(name(1)))
    file.write_bytes(BROKEN[damage](file.read_bytes()))
    one.memory.zero_()
    assert one.look_up(*map(name, range(3))) == [True, True, True]
    job = one.load(0, 1, 2)
    assert not job.is_whole and name(1) not in job.names and name(0) in job.names
    assert one.has(0) and not one.memory[1].any()
    assert one.look_up(name(0), name(1)) == [True, False]
    one.memory[1] = 2
    assert one.save(1).is_whole
    one.store.forget("r")
    assert one.look_up(name(1)) == [True]


def test_a_directory_that_disappears_causes_only_misses(instance: Callable[..., Instance], tmp_path: Path) -> None:
    directory = tmp_path / "store"
    one = instance(directory)
    one.fill(0)
    one.save(0)
    directory.rename(tmp_path / "away")
    assert not one.load(0).is_whole
    assert not one.save(0).is_whole
    assert one.look_up(name(0)) == [False]
    (tmp_path / "away").rename(directory)
    one.store.forget("r")
    assert one.look_up(name(0)) == [True]


def test_a_store_that_hangs_is_abandoned_and_writes_nothing_afterwards(
    instance: Callable[..., Instance], broken: MemoryStore, tmp_path: Path
) -> None:
    one = instance(tmp_path, get_timeout_s=0.2, put_timeout_s=0.2)
    one.fill(0)
    one.save(0)
    one.memory.zero_()
    broken.gate.clear()
    assert one.look_up(name(0)) == [False]
    assert not one.load(0).is_whole
    assert not one.save(0).is_whole
    one.store.drain()
    broken.gate.set()
    one.store.close()
    assert not one.memory.any()


def test_an_unexpected_error_causes_only_misses(
    instance: Callable[..., Instance], broken: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = instance(tmp_path)
    one.fill(0)

    async def fails(*_: Any, **__: Any) -> list[bool]:
        raise RuntimeError("a defect")

    for call in ("put", "get", "exists"):
        monkeypatch.setattr(f"transfer.storage.client.StoreClient.{call}", fails)
    assert not one.save(0).is_whole
    assert not one.load(0).is_whole
    assert one.look_up(name(0)) == [False]


def test_jobs_larger_than_a_batch_are_whole(
    instance: Callable[..., Instance], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_store, "BATCH_BYTES", 2 * PAGE_BYTES)
    one = instance(tmp_path)
    one.fill(*range(7))
    assert one.save(*range(7)).is_whole
    one.memory.zero_()
    assert one.load(*range(7)).is_whole
    assert all(map(one.has, range(7)))


def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"storage.directory is .*file; it must be a folder"):
        Instance(StorageConfig(directory=tmp_path / "file"))


def pages_of(case: str, *, is_portable: bool, **changes: Any) -> list[RankPages]:
    found = []
    for rank in ranks(recorded(case)):
        facts = facts_of(rank["facts"], **changes)
        caches = {layer.name: torch.empty(2, layer.num_kv_heads, layer.block_size, 1) for layer in facts.layers}
        fields = rank_fields(facts, caches, is_portable=is_portable)
        found.append(RankPages(fields=fields, page_bytes=4096, is_portable=is_portable))
    return found


def print_of(case: str, *, is_portable: bool = True, **changes: Any) -> str:
    return fingerprint(pages_of(case, is_portable=is_portable, **changes), model=MODEL, chunks=CHUNKS)


def test_portable_pages_do_not_depend_on_the_tp_degree() -> None:
    assert print_of("llama-block32") == print_of("llama-tp2-block32")
    assert print_of("llama-block32", is_portable=False) != print_of("llama-tp2-block32", is_portable=False)


def test_each_input_of_the_bytes_changes_the_fingerprint() -> None:
    (plain,) = pages_of("llama-block32", is_portable=True)
    layers = facts_of(ranks(recorded("llama-block32"))[0]["facts"]).layers
    prints = [
        fingerprint([plain], model=MODEL, chunks=CHUNKS),
        fingerprint([plain], model={"weights": "xxh3-128:2"}, chunks=CHUNKS),
        fingerprint([plain], model=MODEL, chunks={**CHUNKS, "hash": "sha256_cbor"}),
        fingerprint([replace(plain, page_bytes=8192)], model=MODEL, chunks=CHUNKS),
        fingerprint([replace(plain, is_portable=False)], model=MODEL, chunks={**CHUNKS, "blocks_per_chunk": 2}),
        print_of("llama-block128"),
        print_of("llama-block32", is_portable=False),
        print_of("llama-block32", cache_layout="LBNHC"),
        *(
            print_of("llama-block32", layers=tuple(replace(layer, **{field: value}) for layer in layers))
            for field, value in (("backend", "FLASH_ATTN"), ("isa", "amx"), ("k_scale", 0.5), ("dtype", "bfloat16"))
        ),
    ]
    assert len(set(prints)) == len(prints)


def test_workers_that_do_not_agree_are_named() -> None:
    (plain,) = pages_of("llama-block32", is_portable=True)
    with pytest.raises(LayoutError, match="the workers have pages of 4096, 8192 bytes"):
        fingerprint([plain, replace(plain, page_bytes=8192)], model=MODEL, chunks=CHUNKS)


def test_pages_of_earlier_releases_stay_valid() -> None:
    """A layer that could be stored then has the fields of then, so its fingerprint is the same."""
    for is_portable in (False, True):
        layers: Any = pages_of("llama-block32", is_portable=is_portable)[0].fields["layers"]
        assert list(layers[0]) == [
            "name", "group", "spec", "block_size", "num_kv_heads", "k_head_dim", "v_head_dim", "dtype", "window_tokens",
            "quant_mode", "is_packed_otherwise", "backend", "isa", "k_scale", "v_scale", "num_scales",
        ]  # fmt: skip
