"""KV that moves from one pool to another gives the same tokens, and damaged KV gives others: what every cluster test rests on.

One thing cannot be told from tokens: keys carry their position (rotary embedding), so attention is a sum over a set, and two
whole pages that change places with both K and V leave every token as it is. Such a swap is only visible where it takes K or V
alone, reaches into the unwritten end of the last page, or crosses requests. Page order itself is held by the digest and the
geometry tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from embedded_engine.engine import EmbeddedEngine
from kvferry.demo.model import make_demo_model
from tests.embedded_engine.steps import copy_kv, decode_all, prefill_all, slots_of
from transfer.errors import ConfigError
from transfer.layout import Shard
from transfer.pool.kv_pool import KVPool

NUM_TOKENS = 48
PAGE_SIZE = 16
TEXTS = (
    "The ferry crosses the river with many small parcels, and the captain counts them.",
    "How is the cache of a model moved from the machine that reads to the one that writes? Tell me in one sentence.",
    "Once upon a time, far away, a bell rang seven times. " * 6,
)
Damage = Callable[[KVPool, Sequence[int]], None]


class Patient:
    """One prompt's KV in a pool, and what is generated from it; `unnoticed` does so from many damaged copies."""

    def __init__(self, engine: EmbeddedEngine, token_ids: tuple[int, ...]) -> None:
        self.engine = engine
        self.length = len(token_ids)
        self.num_pages = -(-(self.length + NUM_TOKENS) // PAGE_SIZE)
        self.table = list(range(self.num_pages))
        first = prefill_all(engine, {"a": token_ids}, {"a": self.table})
        self.tokens = decode_all(engine, first, {"a": self.length}, {"a": self.table}, NUM_TOKENS)["a"]

    def unnoticed(self, damages: Mapping[str, Damage]) -> list[str]:
        """The damages after which every token is as it was; a copy is given up at its first token that is not."""
        pool = self.engine.pool
        tables: dict[str, list[int]] = {}
        for index, (name, damage) in enumerate(damages.items()):
            begin = (index + 1) * self.num_pages
            tables[name] = list(range(begin, begin + self.num_pages))
            copy_kv(pool, (self.table,), pool, (tables[name],), self.length)
            damage(pool, tables[name])
        left = list(damages)
        for step, (last, right) in enumerate(pairwise(self.tokens)):
            at = dict.fromkeys(left, self.length + step)
            found = decode_all(self.engine, dict.fromkeys(left, last), at, tables, 2) if left else {}
            left = [name for name in left if found[name][1] == right]
        return left


@pytest.fixture(scope="module", params=range(len(TEXTS)))
def patient(request: pytest.FixtureRequest, demo_dir: Path) -> Patient:
    engine = EmbeddedEngine(demo_dir, shard=Shard(page_size=PAGE_SIZE), num_pages=1700)
    return Patient(engine, tuple(AutoTokenizer.from_pretrained(demo_dir)(TEXTS[request.param])["input_ids"]))


def without_head(layer: int, head: int) -> Damage:
    def damage(pool: KVPool, table: Sequence[int]) -> None:
        for is_v in (False, True):
            pool.buffer(layer, is_v=is_v)[table, :, head] = 0

    return damage


def swapped(first: int, second: int, *, is_v: Sequence[bool] = (False, True)) -> Damage:
    def damage(pool: KVPool, table: Sequence[int]) -> None:
        for layer in range(pool.layout.num_layers):
            for one in is_v:
                pages = pool.buffer(layer, is_v=one)
                pages[[table[first], table[second]]] = pages[[table[second], table[first]]]

    return damage


def shifted(begin: int, end: int) -> Damage:
    """The chunk [begin, end) lands one token late: its last token falls on the next one."""

    def damage(pool: KVPool, table: Sequence[int]) -> None:
        for layer in range(pool.layout.num_layers):
            k, v = pool.read(layer, slots_of(table, range(begin, end), pool.page_size))
            pool.write(layer, slots_of(table, range(begin + 1, end + 1), pool.page_size), k, v)

    return damage


def test_an_undamaged_copy_changes_nothing(patient: Patient) -> None:
    assert patient.unnoticed({"copy": lambda pool, table: None}) == ["copy"]
    assert len(set(patient.tokens)) > 10, "a generation that repeats itself proves little"


def test_zeroing_any_one_kv_head_of_any_layer_changes_the_tokens(patient: Patient) -> None:
    damages = {f"layer {layer} head {head}": without_head(layer, head) for layer in range(8) for head in range(12)}
    assert patient.unnoticed(damages) == []


def test_swapping_any_two_neighbouring_pages_of_k_or_v_changes_the_tokens(patient: Patient) -> None:
    full_pages = patient.length // PAGE_SIZE
    damages = {
        f"{'V' if is_v else 'K'} pages {page} and {page + 1}": swapped(page, page + 1, is_v=[is_v])
        for page in range(full_pages - 1)
        for is_v in (False, True)
    }
    assert patient.length < 2 * PAGE_SIZE or damages
    if patient.length % PAGE_SIZE:
        # The last page is filled in part: the other page's end lies beyond the context, unwritten slots within it.
        damages["the last page"] = swapped(full_pages - 1, full_pages)
    assert patient.unnoticed(damages) == []


def test_a_page_of_another_request_changes_the_tokens(patient: Patient) -> None:
    def damage(pool: KVPool, table: Sequence[int]) -> None:
        generator = torch.Generator().manual_seed(0)
        for layer in range(pool.layout.num_layers):
            for is_v in (False, True):
                page = pool.buffer(layer, is_v=is_v)[table[0]]
                page.copy_(page[torch.randperm(PAGE_SIZE, generator=generator)].roll(1, dims=1))

    assert patient.unnoticed({"foreign": damage}) == []


def test_a_chunk_that_lands_one_token_late_changes_the_tokens(patient: Patient) -> None:
    chunk = 8
    damages = {f"chunk at {begin}": shifted(begin, begin + chunk) for begin in range(0, patient.length - chunk, chunk)}
    assert patient.unnoticed(damages) == []


def test_the_demo_model_is_the_same_every_time_and_different_for_another_seed(demo_dir: Path, tmp_path: Path) -> None:
    torch.manual_seed(99)
    before = torch.random.get_rng_state()
    again = make_demo_model(tmp_path / "again")
    assert torch.equal(before, torch.random.get_rng_state()), "the caller's random state is left alone"
    names = sorted(path.name for path in demo_dir.iterdir())
    assert sorted(path.name for path in again.iterdir()) == names
    assert all((again / name).read_bytes() == (demo_dir / name).read_bytes() for name in names)
    make_demo_model(again, seed=1)
    assert (again / "model.safetensors").read_bytes() != (demo_dir / "model.safetensors").read_bytes()
    (again / "thesis.txt").write_text("precious")
    with pytest.raises(ConfigError, match="holds something else"):
        make_demo_model(again)
