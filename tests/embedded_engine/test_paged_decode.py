"""Decode attention and row writes: the reference against torch, and calls that do not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor

from embedded_engine.kernels.arguments import DecodeCall, WriteCall
from embedded_engine.kernels.reference import reference_decode_attention, reference_write_rows
from tests.embedded_engine.decode_cases import GQA, MHA, DecodeCase
from transfer.errors import ConfigError, LayoutError
from transfer.layout import DType, KVLayout, Shard, TokenOrder
from transfer.pool.kv_pool import PagedKVPool


def token_major(arguments: dict[str, Any], name: str, slots: Tensor) -> Tensor:
    """[KV heads, n, dim] of some slots, read in another way than the reference does."""
    buffer: Tensor = arguments[name]
    page_size = buffer.shape[1] if arguments["order"] is TokenOrder.NHD else buffer.shape[2]
    rows = []
    for slot in slots.tolist():
        page = buffer[slot // page_size]
        rows.append(page[slot % page_size] if arguments["order"] is TokenOrder.NHD else page[:, slot % page_size])
    return torch.stack(rows, dim=1)


@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize("heads", [MHA, GQA])
@pytest.mark.parametrize("order", list(TokenOrder))
def test_the_reference_is_torch_s_own_attention(order: TokenOrder, heads: tuple[int, int], window: int) -> None:
    arguments = DecodeCase(heads=heads, order=order, window_tokens=window, v_dim=24, lengths=(90, 7)).arguments()
    out, lse = reference_decode_attention(DecodeCall(**arguments))
    for request, length in enumerate((90, 7)):
        slots = arguments["slots"][request + 1, max(0, length - window) if window else 0 : length]
        k, v = token_major(arguments, "k", slots), token_major(arguments, "v", slots)
        query = arguments["query"][request][:, None]
        attended = functional.scaled_dot_product_attention(query, k, v, scale=arguments["scale"], enable_gqa=True)
        torch.testing.assert_close(out[request], attended[:, 0], rtol=1e-5, atol=1e-6)
        scores = query @ k.repeat_interleave(heads[0] // heads[1], dim=0).transpose(1, 2) * arguments["scale"]
        torch.testing.assert_close(lse[request], scores.logsumexp(dim=-1)[:, 0])
    assert out[2:].eq(0).all() and lse[2:].eq(float("-inf")).all()


def test_sinks_and_softcap_are_those_of_the_models() -> None:
    """GPT-OSS: the sink is one more logit, dropped after the softmax; Gemma: tanh over the cap, before the mask."""
    arguments = DecodeCase(has_sinks=True, softcap=2.0, lengths=(40,)).arguments()
    out, lse = reference_decode_attention(DecodeCall(**arguments))
    k, v = (token_major(arguments, name, arguments["slots"][1, :40]).repeat_interleave(2, dim=0) for name in ("k", "v"))
    scores = arguments["query"][0][:, None] @ k.transpose(1, 2) * arguments["scale"]
    scores = torch.tanh(scores / 2.0) * 2.0
    combined = torch.cat([scores, arguments["sinks"].reshape(-1, 1, 1)], dim=-1)
    probabilities = torch.softmax(combined, dim=-1)[..., :-1]
    torch.testing.assert_close(out[0], (probabilities @ v)[:, 0])
    torch.testing.assert_close(lse[0], combined.logsumexp(dim=-1)[:, 0])
    assert out[1:].eq(0).all()
    torch.testing.assert_close(lse[1:], arguments["sinks"].expand(2, -1))


def test_without_v_it_is_the_beginning_of_k() -> None:
    arguments = DecodeCase(heads=(6, 1), k_dim=40, v_dim=24, has_v=False, lengths=(33,)).arguments()
    out, _ = reference_decode_attention(DecodeCall(**arguments))
    explicit = arguments | {"v": arguments["k"][..., :24], "v_dim": None}
    assert torch.equal(out, reference_decode_attention(DecodeCall(**explicit))[0])


@pytest.mark.parametrize("order", list(TokenOrder))
def test_rows_are_written_as_the_pool_writes_them(order: TokenOrder) -> None:
    layout = KVLayout.uniform(num_layers=1, num_kv_heads=2, head_dim=8, v_head_dim=4, dtype=DType.FLOAT8_E4M3)
    ours, theirs = (PagedKVPool(layout=layout, shard=Shard(page_size=4, order=order), num_pages=3) for _ in range(2))
    new_k, new_v = torch.randn(4, 2, 8) * 300, torch.randn(4, 2, 4) * 300
    k, v = (ours.buffer(0, is_v=is_v) for is_v in (False, True))
    slots = torch.tensor([5, -1, 12, 0], dtype=torch.int32)
    reference_write_rows(WriteCall(k=k, v=v, new_k=new_k, new_v=new_v, slots=slots, order=order))
    theirs.write(0, torch.tensor([5, 0]), new_k[[0, 3]], new_v[[0, 3]])
    for is_v in (False, True):
        assert torch.equal(ours.buffer(0, is_v=is_v).view(torch.uint8), theirs.buffer(0, is_v=is_v).view(torch.uint8))


WRONG: list[tuple[str, Any, str]] = [
    ("query", torch.zeros(4, 4, 32, dtype=torch.float64), "query is torch.float64"),
    ("query", torch.zeros(4, 7, 32), "query has 7 heads; must be a multiple of k's 2"),
    ("slots", torch.zeros(4, 544, dtype=torch.int64), "slots is torch.int64"),
    ("rows", torch.zeros(8, dtype=torch.int32)[::2], "rows is .*stride .2,.*adjacent"),
]


@pytest.mark.parametrize(("name", "value", "message"), WRONG)
def test_an_attention_call_that_does_not_fit_is_refused(name: str, value: Any, message: str) -> None:
    arguments = DecodeCase(lengths=(20, 5)).arguments()
    with pytest.raises((LayoutError, ConfigError), match=message):
        DecodeCall(**arguments | {name: value})
