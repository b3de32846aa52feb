"""The link between a node's leader and its ranks: local, and of one build; what does not fit is refused all the same."""

from __future__ import annotations

from typing import Any

import msgpack

from decode_node import rank_messages as decode_messages
from fuzz.target import Target, require
from fuzz.trees import tree_mutator
from node_runtime.rank_link import RankCodec
from node_runtime.rank_messages import StepDone, StepFailed
from prefill_node import rank_messages as prefill_messages
from transfer.chunk import ChunkPlan
from transfer.connector.messages import TransferBroken, TransferSent
from transfer.engine_types import SamplingParams
from transfer.errors import LocalProtocolError
from transfer.send.events import SentStats

PLAN = ChunkPlan(chunk_tokens=16)
SAMPLING = SamplingParams(temperature=0.5)
MESSAGES: tuple[tuple[RankCodec, object], ...] = (
    (
        prefill_messages.CODEC,
        prefill_messages.StartRequest(
            transfer_id="r", decode_incarnation=7, num_tokens=9, start_token=0, plan=PLAN, sampling=SAMPLING
        ),
    ),
    (
        prefill_messages.CODEC,
        prefill_messages.RunPrefillStep(
            step=1, parts=(prefill_messages.PrefillStepPart(request_id="r", token_ids=(1, 2), first_token=0, is_last=True),)
        ),
    ),
    (prefill_messages.CODEC, TransferSent(transfer_id="r", stats=SentStats(num_bytes=5))),
    (prefill_messages.CODEC, StepDone(step=1, tokens={"r": 5}, compute_s=0.5)),
    (decode_messages.CODEC, StepFailed(step=1, request_ids=("r",), reason="no", is_fatal=False)),
    (
        decode_messages.CODEC,
        decode_messages.RunDecodeStep(step=3, parts=(decode_messages.DecodeStepPart(request_id="r", token_id=7, position=4),)),
    ),
    (decode_messages.CODEC, TransferBroken(transfer_id="r", reason="no", is_data_loss=True)),
)


def check(data: bytes) -> None:
    codec = prefill_messages.CODEC if data[:1] == b"p" else decode_messages.CODEC
    message = codec.decode(data[1:])
    try:
        again = codec.encode(message)
    except (TypeError, ValueError):
        return  # digits in a text are taken for their number, and some numbers cannot travel: none that a node has
    require(repr(codec.decode(again)) == repr(message), f"{type(message).__name__} does not survive the link")


def _tree(data: bytes) -> Any:
    return [data[0], msgpack.unpackb(data[1:], strict_map_key=False)]


def _bytes(tree: Any) -> bytes:
    return bytes([tree[0]]) + bytes(msgpack.packb(tree[1]))


TARGET = Target(
    name="rank_link",
    about="leader and ranks (msgpack, local)",
    modules=("node_runtime.rank_link", "prefill_node.rank_messages", "decode_node.rank_messages"),
    check=check,
    refuses=(LocalProtocolError,),
    mutate=tree_mutator(_tree, _bytes),
    seeds=lambda: [(b"p" if codec is prefill_messages.CODEC else b"d") + codec.encode(message) for codec, message in MESSAGES],
    max_line_chars=100_000,
    is_one_line=False,
)
