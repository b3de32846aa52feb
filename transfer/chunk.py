"""Divide a request into chunks. Both sides call the same function, so boundaries are never sent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, overload

from transfer.errors import LayoutError
from transfer.layout import DType, KVLayout, PayloadRates, Range, Route, Shard, most_routes, payload_rates


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A token range x layer range of one request that moves as a unit. Knows nothing of pages."""

    index: int
    tokens: Range
    layers: Range


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPlan:
    """How requests are divided: agreed at attach, the same on both sides.

    Args:
        chunk_tokens: Tokens per chunk. Boundaries lie on multiples of it, counted from token 0 of the prompt.
        layers_per_group: Layers per chunk; 0 for all layers in one chunk.
        token_layers: A chunk has more layers than `layers_per_group` if its tokens times its layers are at most this number.
    """

    chunk_tokens: int
    layers_per_group: int = 0
    token_layers: int = 0

    def __post_init__(self) -> None:
        if self.chunk_tokens < 1:
            raise LayoutError(f"chunk_tokens is {self.chunk_tokens}; it must be at least 1")
        if self.layers_per_group < 0:
            raise LayoutError(f"layers_per_group is {self.layers_per_group}; it must be 0 (all layers) or more")
        if self.token_layers < 0:
            raise LayoutError(f"token_layers is {self.token_layers}; it must be 0 or more")

    def __str__(self) -> str:
        """Return the sizes for errors: "128 tokens and 2 layers"."""
        more = f" (token_layers {self.token_layers})" if self.token_layers else ""
        return f"{self.chunk_tokens} tokens and {self.layers_per_group or 'all'} layers{more}"

    def layers_of(self, num_tokens: int, num_layers: int) -> int:
        """Return the layers of a chunk of `num_tokens`, at most `num_layers`. The last chunk of these tokens may have fewer."""
        return min(num_layers, max(self.layers_per_group or num_layers, self.token_layers // num_tokens))


MAX_PIECES: Final = 1 << 16
"""Pieces (chunks x routes) of one request on one rank: 1,048,576 tokens in chunks of 128 tokens on 8 routes.

A rank keeps some 500 bytes for each piece until the request is over, and walks over all pieces when the request fails.
The peer of a decode rank chooses the plan, so the plan must be bounded.
"""


def check_num_pieces(
    plan: ChunkPlan, layout: KVLayout, prefill: Shard, decode: Shard, *, num_tokens: int, start_token: int = 0
) -> None:
    """Raise LayoutError if the plan has more pieces of a request than one rank can keep; the message contains the numbers.

    Args:
        prefill, decode: The shards of any rank of the instances.
    """
    num_routes = most_routes(layout, prefill, decode)
    num_chunks = len(split_into_chunks(plan, num_tokens=num_tokens, num_layers=layout.num_layers, start_token=start_token))
    if num_chunks * num_routes > MAX_PIECES:
        raise LayoutError(
            f"{num_tokens - start_token} tokens in chunks of {plan} are {num_chunks} chunks; a request on {num_routes} routes "
            f"can have {MAX_PIECES // num_routes}: raise chunk.chunk_tokens, chunk.piece_bytes or chunk.layers_per_group of the "
            "prefill node"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ranges:
    """Consecutive token ranges of a request with the same groups of layers.

    Args:
        begin, end: Numbers of the first token range, and of the one after the last.
        groups: Layers of the chunks of each token range, in their order.
        first_index, end_index: Index of the first chunk, and of the one after the last.
    """

    begin: int
    end: int
    groups: tuple[Range, ...]
    first_index: int
    end_index: int


class Chunks(Sequence[Chunk]):
    """The chunks of one request, in the order in which prefill computes them. Each chunk is created on access."""

    def __init__(self, plan: ChunkPlan, *, num_tokens: int, num_layers: int, start_token: int) -> None:
        if not 0 <= start_token < num_tokens:
            raise LayoutError(f"start_token is {start_token}, num_tokens is {num_tokens}; need 0 <= start_token < num_tokens")
        if num_layers < 1:
            raise LayoutError(f"num_layers is {num_layers}; it must be at least 1")
        self._plan, self._num_tokens, self._start_token = plan, num_tokens, start_token
        self._first_range = start_token // plan.chunk_tokens
        self.num_ranges = -(-num_tokens // plan.chunk_tokens) - self._first_range
        self.ranges: list[_Ranges] = []
        """All token ranges. Only the first and the last one can have fewer tokens than the others."""
        bounds = {0, 1, self.num_ranges - 1, self.num_ranges} if plan.token_layers else {0, self.num_ranges}
        first_index = 0
        for begin, end in pairwise(sorted(bounds)):
            layers = plan.layers_of(len(self.tokens_of(begin)), num_layers)
            groups = tuple(Range(begin=one, end=min(num_layers, one + layers)) for one in range(0, num_layers, layers))
            end_index = first_index + (end - begin) * len(groups)
            self.ranges.append(_Ranges(begin=begin, end=end, groups=groups, first_index=first_index, end_index=end_index))
            first_index = end_index

    @property
    def layer_ends(self) -> frozenset[int]:
        """The layers after which a chunk ends."""
        return frozenset(layers.end for one in self.ranges for layers in one.groups)

    def __len__(self) -> int:
        return self.ranges[-1].end_index

    @overload
    def __getitem__(self, index: int) -> Chunk: ...
    @overload
    def __getitem__(self, index: slice) -> list[Chunk]: ...
    def __getitem__(self, index: int | slice) -> Chunk | list[Chunk]:
        if isinstance(index, slice):
            return [self._make(at) for at in range(*index.indices(len(self)))]
        return self._make(range(len(self))[index])

    def __iter__(self) -> Iterator[Chunk]:
        return map(self._make, range(len(self)))

    def range_of(self, token: int) -> int:
        """Return the number of the token range that ends after `token`: 0 for the first one, `num_ranges` if there is none."""
        return max(0, token // self._plan.chunk_tokens - self._first_range) if token < self._num_tokens else self.num_ranges

    def place_of(self, index: int) -> tuple[int, int, int]:
        """Return the place in `ranges` of a chunk's token range, the number of the token range, and the group of layers there."""
        place = 0
        while index >= self.ranges[place].end_index:
            place += 1
        one = self.ranges[place]
        at, group = divmod(index - one.first_index, len(one.groups))
        return place, one.begin + at, group

    def tokens_of(self, number: int) -> Range:
        """Return the tokens of a token range."""
        begin = (self._first_range + number) * self._plan.chunk_tokens
        end = min(self._num_tokens, begin + self._plan.chunk_tokens)
        return Range(begin=max(begin, self._start_token), end=end)

    def _make(self, index: int) -> Chunk:
        place, number, group = self.place_of(index)
        return Chunk(index=index, tokens=self.tokens_of(number), layers=self.ranges[place].groups[group])


def split_into_chunks(plan: ChunkPlan, *, num_tokens: int, num_layers: int, start_token: int = 0) -> Chunks:
    """Divide tokens [start_token, num_tokens) x all layers into chunks.

    Every (token, layer) lies in exactly one chunk; `Chunk.index` counts from 0. Raise LayoutError if the token range is empty or
    negative, or there are no layers.
    """
    return Chunks(plan, num_tokens=num_tokens, num_layers=num_layers, start_token=start_token)


class Pieces:
    """The parts of a request's chunks that travel on one route, with their payload. Both sides use this class.

    Each piece is created on access. A long prompt has tens of thousands of pieces, and a rank accepts a request within one turn
    of its loop.

    Args:
        chunks: All chunks of the request.
        num_tokens: Tokens of the whole prompt.
        dtype: Element type on the wire.
    """

    def __init__(self, chunks: Chunks, layout: KVLayout, route: Route, *, num_tokens: int, dtype: DType) -> None:
        self._chunks, self._route, self._num_tokens = chunks, route, route.own_count(num_tokens)
        self._rates = [[payload_rates(layout, route, layers, dtype) for layers in one.groups] for one in chunks.ranges]
        # The payload of a group of layers begins at one token. Its pieces are the chunks from that token range on.
        self._first_ranges = [[chunks.range_of(rates.first_token(num_tokens)) for rates in of_one] for of_one in self._rates]
        # Token ranges without a token of the route. A sharded route has no windows.
        self._empty: frozenset[int] = frozenset()
        if route.token_shard is not None:
            numbers = range(chunks.num_ranges)
            self._empty = frozenset(number for number in numbers if not len(route.own_tokens(chunks.tokens_of(number))))
        self._len = sum(
            max(0, one.end - max(one.begin, first)) - sum(max(one.begin, first) <= number < one.end for number in self._empty)
            for one, of_one in zip(chunks.ranges, self._first_ranges, strict=True)
            for first in of_one
        )
        self._sizes: dict[int, int] = {}  # of the pieces that were asked about: each is asked about a few times

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[tuple[Chunk, int]]:
        for one, of_one in zip(self._chunks.ranges, self._first_ranges, strict=True):
            for index in range(one.first_index + max(0, min(of_one) - one.begin) * len(of_one), one.end_index):
                if self._is_piece(index):
                    chunk = self._chunks[index]
                    yield chunk, self._size_of(chunk)

    def size_of(self, index: int) -> int:
        """Return the payload of a chunk in bytes; 0 if the chunk has no payload on this route, or does not exist."""
        size = self._sizes.get(index)
        if size is None:
            is_piece = 0 <= index < len(self._chunks) and self._is_piece(index)
            size = self._size_of(self._chunks[index]) if is_piece else 0
            if size:
                self._sizes[index] = size
        return size

    def _is_piece(self, index: int) -> bool:
        place, number, group = self._chunks.place_of(index)
        return self._first_ranges[place][group] <= number and number not in self._empty

    def num_slices(self, chunk: Chunk) -> int:
        """Return the writes that a piece would take as token x layer x K/V slices."""
        return self._rates_of(chunk).num_slices(self._route.own_tokens(chunk.tokens), self._num_tokens)

    def _size_of(self, chunk: Chunk) -> int:
        return self._rates_of(chunk).num_bytes(self._route.own_tokens(chunk.tokens), self._num_tokens)

    def _rates_of(self, chunk: Chunk) -> PayloadRates:
        place, _, group = self._chunks.place_of(chunk.index)
        return self._rates[place][group]


def largest_wire_bytes(plan: ChunkPlan, layout: KVLayout, routes: Iterable[Route], dtype: DType) -> int:
    """Return the payload of the largest piece of any request on one of `routes`, in bytes; 0 without routes.

    Ring and staging slots must hold it. `dtype` is the element type on the wire.
    """
    # Prompts of one chunk: any other chunk with as many layers has the same pieces, or smaller ones behind a window. Of a token
    # shard, most tokens are in a chunk that begins with it.
    every = [
        replace(route, token_shard=None if route.token_shard is None else replace(route.token_shard, index=0)) for route in routes
    ]
    return max((_largest_of(plan, layout, every, dtype, most) for most in _most_tokens(plan, layout.num_layers)), default=0)


def _most_tokens(plan: ChunkPlan, num_layers: int) -> Iterator[int]:
    """Yield the most tokens that chunks can have, for each number of their layers."""
    tokens = plan.chunk_tokens
    while tokens:
        yield tokens
        layers = plan.layers_of(tokens, num_layers)
        tokens = plan.token_layers // (layers + 1) if layers < num_layers else 0


def _largest_of(plan: ChunkPlan, layout: KVLayout, routes: Iterable[Route], dtype: DType, num_tokens: int) -> int:
    """Return the payload of the largest piece of a prompt, in bytes; 0 without routes."""
    chunks = split_into_chunks(plan, num_tokens=num_tokens, num_layers=layout.num_layers)
    sizes = (size for route in routes for _, size in Pieces(chunks, layout, route, num_tokens=num_tokens, dtype=dtype))
    return max(sizes, default=0)
