"""Name stored pages. Equal KV has equal keys, and KV that differs in anything has different keys.

A page's hash names all tokens from the prompt's first to the page's last, because the KV of a token depends on all tokens before:
``h_i = SHA-256(h_{i-1}, tokens of page i)``. The chain begins with the fingerprint of all other inputs of the KV, the salts that
separate tenants, and what else changes the KV: approximate attention, and the precision on its way into the pool. Only whole
pages have a hash.

A key is ``FINGERPRINT/HASH-GROUP-PART``. A tensor-parallel rank stores its own heads, so PART is ``1of2``. An MLA latent is the
same on every rank and is stored once, as ``all``. With several pipeline stages, the stage's layers come first: ``0_16-1of2``.

Pure: no clock, no files.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from transfer.errors import ConfigError
from transfer.instance import Instance
from transfer.layer_groups import LayerGroup
from transfer.layout import KVLayout, LayerKind, Shard, wire_dtype

STORE_FORMAT: Final = 1
"""Version of the keys and of the layout of a page (`transfer.storage.pages`). Increase it with any change of either."""

FINGERPRINT_CHARS: Final = 32
MAX_KEY_CHARS: Final = 255
"""Most characters of a key, so that its last part is a file name everywhere."""

RUNNING_SUFFIX: Final = "-running"
"""End of the keys of `running_key`, so that an operator can find the leftovers of killed nodes."""

_KEY: Final = re.compile(rf"[0-9a-f]{{{FINGERPRINT_CHARS}}}/[0-9a-z][0-9a-z_.-]*")


def store_fingerprint(instance: Instance) -> str:
    """Return 32 hex digits of all inputs of the instance's stored pages except tokens. They are stable across versions.

    The inputs are the layout of the model's KV, its fields with the digest of its weights, the scales of a pool of 8-bit floats,
    and page size, order and element type of the pool. The number of ranks is in the key of each page instead.
    """
    layout, shard = instance.layout, instance.shard
    named = {
        "format": STORE_FORMAT,
        "layout": layout.fields(),
        "model": dict(instance.model_fields),
        "kv_scales": _exact_scales(instance),
        "dtype": str(shard.pool_dtype(layout)),
        "order": str(shard.order),
        "page_size": shard.page_size,
    }
    return fields_fingerprint(named)


def fields_fingerprint(named: Mapping[str, object]) -> str:
    """Return the fingerprint, 32 hex digits, of named JSON values. The order of the names does not matter."""
    return hashlib.sha256(_canonical(named).encode()).hexdigest()[:FINGERPRINT_CHARS]


def rounding(prefill: Instance, decode: Instance) -> str:
    """Return what changes a prompt's KV before it reaches the decode instance's pool: approximate attention, and the wire's type.

    A wire that is narrower than the decode pool has the element type of the prefill pool, and its scales. Generated tokens and
    pages that are loaded again belong to the chain of their prompt, because they were computed from KV with that rounding.

    Returns:
        Empty with full attention, if the wire has the element type of the decode pool, which the fingerprint names.
    """
    wire = wire_dtype(decode.layout, prefill.shard, decode.shard)
    named: dict[str, object] = {"attention": prefill.attention} if prefill.attention else {}
    if wire is not decode.pool_dtype:
        named |= {"dtype": str(wire), "kv_scales": _exact_scales(prefill)}
    return _canonical(named) if named else ""


def chain_seed(fingerprint: str, store_salt: str, request_salt: str, rounded: str = "") -> bytes:
    """Return the beginning of a request's hash chain: 32 bytes.

    Args:
        store_salt: The nodes' `storage.salt`. Nodes share pages only with nodes of the same salt.
        request_salt: The request's `cache_salt`. Requests share pages only with requests of the same salt.
        rounded: See `rounding`. Empty adds nothing, so that the keys of unrounded pages do not change.
    """
    digest = hashlib.sha256(b"kvferry-kv-chain")
    for text in (fingerprint, store_salt, request_salt, *([rounded] if rounded else ())):
        encoded = text.encode()
        digest.update(struct.pack("<Q", len(encoded)) + encoded)  # the length separates the texts
    return digest.digest()


class PageHashes:
    """The hash chain of one request, which grows with its tokens.

    Args:
        page_size: Tokens per page, at least 1.
        seed: See `chain_seed`.

    Attributes:
        hashes: Hash of every whole page so far, 32 bytes each. Do not change the list.
    """

    def __init__(self, *, page_size: int, seed: bytes) -> None:
        if page_size < 1:
            raise ConfigError(f"page_size is {page_size}; it must be at least 1 token")
        self._page_size = page_size
        self._last = seed
        self._tail: list[int] = []  # tokens after the last whole page
        self.hashes: list[bytes] = []

    @property
    def num_tokens(self) -> int:
        """Tokens so far, including those of the last page, which is not whole yet."""
        return len(self.hashes) * self._page_size + len(self._tail)

    def extend(self, token_ids: Iterable[int]) -> Sequence[bytes]:
        """Add the next tokens, with ids in [0, 2**32). Return the hashes of the pages that became whole."""
        known = len(self.hashes)
        tokens = [*self._tail, *token_ids]
        num_whole = len(tokens) // self._page_size * self._page_size
        packed = struct.pack(
            f"<{num_whole}I", *tokens[:num_whole]
        )  # with pages of one token, packing each page by itself takes twice as long
        last, page_bytes = self._last, 4 * self._page_size
        for begin in range(0, len(packed), page_bytes):
            last = hashlib.sha256(last + packed[begin : begin + page_bytes]).digest()
            self.hashes.append(last)
        self._last = last
        self._tail = tokens[num_whole:]
        return self.hashes[known:]


def is_shared(group: LayerGroup, *, layout: KVLayout) -> bool:
    """Return whether the group's pages are the same on every TP rank, as those of MLA layers are."""
    return all(layout.layers[layer].kind is LayerKind.MLA for layer in group.layers)


def storing_rank(group: LayerGroup, *, layout: KVLayout, shard: Shard) -> int:
    """Return the TP rank that stores this rank's page: the first of the ranks that hold the same heads.

    That is this rank, unless the group `is_shared` or there are more ranks than KV heads.
    """
    if is_shared(group, layout=layout):
        return 0
    numbers = {layout.layers[layer].num_kv_heads for layer in group.layers}
    # Ranks that share every head are consecutive; the one with the most heads has the fewest sharers.
    return max(_first_with(shard, shard.heads(number).begin, number) for number in numbers)


def store_key(fingerprint: str, page_hash: bytes, *, group: LayerGroup, layout: KVLayout, shard: Shard) -> str:
    """Return the key of the rank's page of a group. All ranks that hold the same bytes have the same key.

    Args:
        group: A group that keeps tokens; states are not stored.
    """
    stage = shard.layers(layout)
    stage_part = f"{stage.begin}_{stage.end}-" if shard.pp_size > 1 else ""
    part = "all" if is_shared(group, layout=layout) else f"{storing_rank(group, layout=layout, shard=shard)}of{shard.tp_size}"
    return f"{fingerprint}/{page_hash.hex()}-{group.name}-{stage_part}{part}"


def running_key(fingerprint: str, name: bytes, *, layer: int, group: LayerGroup, layout: KVLayout, shard: Shard) -> str:
    """Return the key of one layer of a block of pages that a running request keeps in the store.

    The key is private to the request, because the bytes have another layout than a page.

    Args:
        name: Names the block. No other block of any node has the same name.
    """
    block_hash = hashlib.sha256(name + struct.pack("<I", layer)).digest()
    return store_key(fingerprint, block_hash, group=group, layout=layout, shard=shard) + RUNNING_SUFFIX


def fingerprint_of(key: str) -> str:
    """Return the fingerprint in a key.

    Raises:
        ConfigError: It is no key, so no store may use it as a path.
    """
    if len(key) > MAX_KEY_CHARS or _KEY.fullmatch(key) is None:
        raise ConfigError(f"store key is {key[:MAX_KEY_CHARS]!r}; it must be a result of store_key")
    return key[:FINGERPRINT_CHARS]


def _first_with(shard: Shard, head: int, num_kv_heads: int) -> int:
    """Return the first TP rank whose heads begin with `head`: the least r with r * heads // tp_size == head."""
    return -(-head * shard.tp_size // num_kv_heads)


def _exact_scales(instance: Instance) -> list[list[str]]:
    """Return the scales to the last bit."""
    return [[scale.hex() for scale in map(float, pair)] for pair in instance.kv_scales]


def _canonical(named: Mapping[str, object]) -> str:
    return json.dumps(named, sort_keys=True, separators=(",", ":"))
