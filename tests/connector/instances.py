"""Engines that only keep KV, each with a kvferry that it hosts: real transports, channels and servers, in one process."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar
from urllib.request import urlopen

import torch
from torch import Tensor

from kvferry.engines.connector import DECODE, ConnectorEngine, Sides
from kvferry.engines.connector_leader import ConnectorLeader
from kvferry.engines.connector_rank import ConnectorRank
from transfer.config import ConnectorConfig, ConnectorLimitsConfig
from transfer.connector.bound_prompts import PromptState
from transfer.connector.incoming_rank import Settled
from transfer.connector.outgoing import Transfer
from transfer.connector.outgoing_rank import Free
from transfer.layout import DType, KVLayout, Shard
from transfer.load_config import load_config
from transfer.pool.kv_pool import KVPool

LAYERS, HEADS, DIM, PAGES = 4, 4, 8, 64
LAYOUT = KVLayout.uniform(num_layers=LAYERS, num_kv_heads=HEADS, head_dim=DIM, dtype=DType.FLOAT32)
TIMEOUT_S = 60.0


def prompt_of(num_tokens: int, seed: int = 0) -> tuple[int, ...]:
    return tuple((index * 37 + 101 * seed + 11) % 1000 for index in range(num_tokens))


PROMPT = prompt_of(100)
FROM = list(range(7))
"""Its pages in a source, of 16 tokens each."""

TO = list(range(PAGES - 1, PAGES - 8, -1))
"""Its pages in a target."""

_T = TypeVar("_T")


def wait_for(look: Callable[[], _T | None], what: str, timeout_s: float = TIMEOUT_S) -> _T:
    deadline = time.monotonic() + timeout_s
    while (found := look()) is None or found is False:
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.002)
    return found


class Limits(ConnectorLimitsConfig, frozen=False):
    """Limits that a test lowers for one prompt, so that a busy machine does not exceed them in a hand-over that must succeed."""


class Instance:
    """All ranks of one instance and its leader, or those of one host.

    Args:
        shard: Of all ranks; None: `tp_size` ranks.
        ranks: Those that are here; None: all.
        has_leader: Whether the leader is here.
        settings: Of `ConnectorConfig`, by path.
        model: Told to the other side as a field of the model.
        pool_of: Makes a rank's pool; None: in host memory.
        compute: See `ConnectorLeader`.
    """

    def __init__(
        self,
        sides: Sides,
        *,
        tp_size: int = 1,
        page_size: int = 16,
        shard: Shard | None = None,
        ranks: Sequence[int] | None = None,
        has_leader: bool = True,
        settings: dict[str, Any] | None = None,
        model: str = "numbers",
        name: str | None = None,
        pool_of: Callable[[Shard], KVPool] | None = None,
        compute: Callable[[Transfer], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        self.page_size = page_size
        defaults: dict[str, Any] = {"tls.insecure": 1, "chunk.chunk_tokens": 32, "ring.capacity_bytes": 1 << 20}
        defaults["heartbeat.interval_s"] = 2.0  # a process that a loaded machine does not run for a second is not dead
        config = load_config(ConnectorConfig, flags=defaults | (settings or {}))
        self.limits = Limits(**dict(config.limits))
        config = config.model_copy(update={"limits": self.limits})
        name = name or f"test-{secrets.token_hex(8)}"
        shard = shard or Shard(tp_size=tp_size, page_size=page_size)
        pool_of = pool_of or (lambda one: KVPool(layout=LAYOUT, shard=one, num_pages=PAGES))
        ranks = range(shard.num_ranks) if ranks is None else ranks
        self.pools = [pool_of(shard.at(rank)) for rank in ranks]
        self.ranks = [
            ConnectorRank(
                config,
                instance=name,
                rank=rank,
                sides=sides,
                engine=ConnectorEngine(
                    layout=pool.layout,
                    shard=pool.shard,
                    pool=pool,
                    model_fields={"name": model},
                    max_context_tokens=1024,
                    vocab_size=1000,
                ),
            )
            for rank, pool in zip(ranks, self.pools, strict=True)
        ]
        self.news: list[list[Any]] = [[] for _ in self.ranks]
        if not has_leader:
            return
        try:
            self.leader = ConnectorLeader(config, instance=name, num_ranks=shard.num_ranks, sides=sides, compute=compute)
        except BaseException:
            for rank in self.ranks:
                rank.close()
            raise
        try:
            self.leader.start()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.leader.close()
        for rank in self.ranks:
            rank.close()

    # Of a source

    def compute(self, name: str, pages: Sequence[int], prompt: Sequence[int], begin: int, end: int) -> None:
        """Write the KV of these tokens into the pool of every rank here, and say so."""
        for rank, pool in zip(self.ranks, self.pools, strict=True):
            write(pool, pages, prompt, begin, end)
            rank.progress(name, [list(pages)], end)

    def computes(self, name: str, transfer_id: str, *, pages: Sequence[int] = FROM, end: int = 100) -> None:
        """The engine is given `PROMPT`, and computes its first tokens."""
        self.leader.offer(name, transfer_id, PROMPT)
        self.leader.begin(name)
        self.compute(name, pages, PROMPT, 0, end)

    def sends(self, name: str, transfer_id: str, *, pages: Sequence[int] = FROM, **said: Any) -> None:
        """... and all of it."""
        self.computes(name, transfer_id, pages=pages)
        self.finish(name, **said)

    def finish(self, name: str, **said: Any) -> None:
        for rank in self.ranks:
            rank.finish(name)
        self.leader.finish(name, **said)

    # Of a target

    def fetches(self, name: str, transfer_id: str, source: Instance, *, pages: Sequence[int] = TO, **said: Any) -> None:
        """The engine wants `PROMPT`, and has pages for it at once."""
        self.leader.want(name, transfer_id, source.leader.address, PROMPT, **said)
        self.leader.bind(name, [list(pages)])

    def wait_until_ready(self, name: str) -> None:
        def look() -> bool:
            view = self.leader.view(name)
            assert view is not None and view.state is not PromptState.FAILED, view
            return view.state is PromptState.READY

        wait_for(look, f"{name} is ready")

    def wait_until_failed(self, name: str) -> str:
        def look() -> str | None:
            view = self.leader.view(name)
            assert view is not None
            return view.failure if view.state is PromptState.FAILED else None

        return wait_for(look, f"{name} has failed")

    def assert_has(self, pages: Sequence[int], prompt: Sequence[int], *, begin: int = 0) -> None:
        """Every rank has exactly its heads' KV of the prompt from `begin` on, bit for bit."""
        for layer in range(LAYERS):
            assert self.has(pages, prompt, begin=begin, layers=range(layer, layer + 1)), f"layer {layer}"

    def has(self, pages: Sequence[int], prompt: Sequence[int], *, begin: int = 0, layers: Sequence[int]) -> bool:
        """Return whether every rank has exactly its heads' KV of `layers`, from token `begin` on."""
        slots = slots_of(pages, range(begin, len(prompt)), self.page_size)
        for pool in self.pools:
            heads = pool.shard.heads(HEADS)
            for layer in set(layers) & set(layers_of(pool)):
                found = (one.cpu() for one in pool.read(layer, slots.to(pool.device)))
                wanted = (one[begin:, heads.begin : heads.end] for one in kv_of(prompt, layer))
                if not all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True)):
                    return False
        return True

    # Of both

    def heard(self, name: str, kind: type[_T], *, timeout_s: float = TIMEOUT_S) -> _T:
        """That news of the prompt, once every rank has it; what they were told must be the same."""

        def look() -> _T | None:
            self.poll_events()
            found = [next((one for one in news if isinstance(one, kind) and one.name == name), None) for news in self.news]
            return found[0] if None not in found else None

        first = wait_for(look, f"{kind.__name__} of {name}", timeout_s)
        assert all(first in news for news in self.news)
        return first

    def settled(self, name: str) -> Settled:
        return self.heard(name, Settled)

    def freed(self, name: str) -> Free:
        return self.heard(name, Free)

    def outcomes(self, role: str) -> dict[str, int]:
        """Requests that this side's leader has counted."""
        with urlopen(f"http://{self.leader.http_address}/metrics", timeout=TIMEOUT_S) as answer:
            page = answer.read().decode()
        found = re.findall(rf'^kvferry_requests_total\{{outcome="(\w+)",role="{role}"\}} (\S+)$', page, re.MULTILINE)
        return {outcome: int(float(number)) for outcome, number in found if float(number)}

    def poll_events(self) -> None:
        for rank, news in zip(self.ranks, self.news, strict=True):
            news.extend(rank.poll_events())

    def joined(self) -> bool:
        """Of a target: whether its first prefill node is joined."""
        return self.leader.num_joined > 0

    def assert_idle(self) -> None:
        """Nothing is left of any prompt, in the leader or on a rank."""

        def is_idle() -> bool:
            self.poll_events()  # no rank is idle before its engine has taken the last event, and ranks report at different times
            return self.leader.is_idle and all(rank.is_idle for rank in self.ranks)

        wait_for(is_idle, "nothing is left")


def target(
    source: Instance | str,
    *,
    tp_size: int = 1,
    page_size: int = 16,
    pool_of: Callable[[Shard], KVPool] | None = None,
    **settings: Any,
) -> Instance:
    """A decode side that has joined the source, or the prefill side at that address."""
    address = source if isinstance(source, str) else source.leader.address
    settings = {"peers.prefill_nodes": (address,)} | settings
    instance = Instance(DECODE, tp_size=tp_size, page_size=page_size, pool_of=pool_of, settings=settings)
    try:
        wait_for(instance.joined, "the decode side has joined")
    except BaseException:
        instance.close()
        raise
    return instance


def write(pool: KVPool, pages: Sequence[int], prompt: Sequence[int], begin: int, end: int) -> None:
    """KV of the prompt's tokens [begin, end), as far as the rank has it; on a GPU it is queued on the current stream."""
    slots = slots_of(pages, range(begin, end), pool.page_size).to(pool.device)
    heads = pool.shard.heads(HEADS)
    for layer in layers_of(pool):
        k, v = (values[begin:end, heads.begin : heads.end].to(pool.device) for values in kv_of(prompt, layer))
        pool.write(layer, slots, k, v)


def layers_of(pool: KVPool) -> range:
    """Layers of the rank's pipeline stage."""
    layers = pool.shard.layers(pool.layout)
    return range(layers.begin, layers.end)


def slots_of(pages: Sequence[int], tokens: range, page_size: int) -> Tensor:
    return torch.tensor([pages[token // page_size] * page_size + token % page_size for token in tokens])


def kv_of(prompt: Sequence[int], layer: int) -> tuple[Tensor, Tensor]:
    """K and V [tokens, heads, dim] that depend on token, place, layer and head."""
    generator = torch.Generator().manual_seed(layer)
    basis = torch.randn(2, HEADS, DIM, generator=generator)
    tokens = torch.tensor(prompt, dtype=torch.float32) + torch.arange(len(prompt)) * 1000
    return tokens[:, None, None] * basis[0], tokens[:, None, None] * basis[1]


def hand_over(source: Instance, decode: Instance, name: str) -> None:
    """That both are well: a prompt goes through, and nothing is left of any."""
    decode.fetches(name, name, source)
    source.sends(name, name)
    assert decode.settled(name).failure == ""
    decode.assert_has(TO, PROMPT)
    assert source.freed(name).failure == ""
    source.assert_idle()
    decode.assert_idle()
    source.leader.check()
    decode.leader.check()
