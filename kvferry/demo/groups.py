"""What of a run each group of layers took: pages of the pools, tokens and bytes that travelled, tokens that did not have to.

Counted from both tiers' geometry and the lengths of the requests. The bytes are those that the senders count as well, and a page
count larger than a pool says that its pages were used again, for a request gets every page of its tables before it is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transfer.layer_groups import GroupKind, LayerGroup, layer_groups
from transfer.layout import KVLayout, LayerKind, Range, Shard, routes, wire_buffers, wire_dtype
from transfer.pb import kvferry_pb2 as pb
from transfer.registry.convert import instance_from_proto

_KEPT = {LayerKind.MLA: "latent", LayerKind.RECURRENT_STATE: "state"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReport:
    """One group of layers that share pages. Field names are those of ``--json``.

    Args:
        name: ``full``, ``window_64``, ``state``.
        keeps: What it keeps: "K or V" or a "latent" of a token, or the "state" of a request.
        layers: Number of layers.
        prefill_pages, decode_pages: Pages of each rank's pool.
        prefill_pages_used, decode_pages_used: Pages that all requests took of it, one after the other.
        tokens_sent: Tokens of the prompts that decode was sent; of states, their number.
        tokens_left_out: Tokens of the prompts that did not have to travel, because decode reads nothing of them.
        bytes_sent: Over all pairs of ranks; chunks that were sent again not included.
    """

    name: str
    keeps: str
    layers: int
    prefill_pages: int
    decode_pages: int
    prefill_pages_used: int
    decode_pages_used: int
    tokens_sent: int
    tokens_left_out: int
    bytes_sent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLengths:
    """Of a request that is over: tokens of its prompt, and those that were generated from it, the first included."""

    prompt_tokens: int
    generated_tokens: int


def group_reports(prefill: pb.NodeStatus, decode: pb.NodeStatus, requests: Sequence[RequestLengths]) -> tuple[GroupReport, ...]:
    """One for each group, in the order of the model's groups; none where a node does not say what it is.

    Args:
        prefill, decode: Status of both nodes.
        requests: Those that ended well.
    """
    if not (prefill.HasField("instance") and decode.HasField("instance") and prefill.ranks and decode.ranks):
        return ()
    source, target = instance_from_proto(prefill.instance), instance_from_proto(decode.instance)
    layout = target.layout
    pages = [{pool.group: pool.pages for pool in node.ranks[0].pools} for node in (prefill, decode)]
    found: list[GroupReport] = []
    for group in layer_groups(layout):
        sent, left_out = 0, 0
        for request in requests:
            first = group.first_travelling_token(request.prompt_tokens)
            sent += 1 if group.kind is GroupKind.STATE else request.prompt_tokens - first
            left_out += request.prompt_tokens if group.kind is GroupKind.STATE else first
        found.append(
            GroupReport(
                name=group.name,
                keeps=_KEPT.get(layout.layers[group.layers[0]].kind, "K or V"),
                layers=len(group.layers),
                prefill_pages=pages[0].get(group.name, 0),
                decode_pages=pages[1].get(group.name, 0),
                prefill_pages_used=sum(group.num_pages(one.prompt_tokens, source.shard.page_size) for one in requests),
                decode_pages_used=sum(_decode_pages(group, target.shard.page_size, one) for one in requests),
                tokens_sent=sent,
                tokens_left_out=left_out,
                bytes_sent=sum(_bytes_sent(group, layout, source.shard, target.shard, one.prompt_tokens) for one in requests),
            )
        )
    return tuple(found)


def _decode_pages(group: LayerGroup, page_size: int, request: RequestLengths) -> int:
    computed = request.prompt_tokens + request.generated_tokens - 1  # nothing is computed from the last token
    return group.num_pages(computed, page_size) - group.first_travelling_token(request.prompt_tokens) // page_size


def _bytes_sent(group: LayerGroup, layout: KVLayout, prefill: Shard, decode: Shard, num_tokens: int) -> int:
    dtype = wire_dtype(layout, prefill, decode)
    whole = Range(begin=0, end=num_tokens)
    layers = Range(begin=0, end=layout.num_layers)
    return sum(
        buffer.num_bytes
        for route in routes(layout, prefill, decode)
        for buffer in wire_buffers(layout, route, tokens=whole, layers=layers, num_tokens=num_tokens, dtype=dtype)
        if buffer.layer in group.layers
    )
