"""Prefill with KV in host memory on a real GPU: logits are those of the device alone, and reported KV is in host pages."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from embedded_engine.engine import EmbeddedEngine
from embedded_engine.model_files import read_model_files
from tests.embedded_engine.families import FAMILIES
from tests.embedded_engine.steps import Directory, PageBook, Prompts, pages_for
from tests.embedded_engine.test_host_prefill import HOSTED, LENGTHS, Hosted
from tests.embedded_engine.test_tiered_decode import WITHOUT_FULL_ATTENTION
from tests.gpu.small_engines import prompts_of
from transfer.engine_types import PrefillItem
from transfer.layer_groups import layer_groups
from transfer.layout import DType, Shard

pytestmark = pytest.mark.timeout(600)

DEVICE = "cuda"
MODELS = ("llama", *(name for name in FAMILIES if name not in WITHOUT_FULL_ATTENTION))
CHUNK = 15
TOLERANCES = {DType.FLOAT32: 2e-3, DType.BFLOAT16: 6e-2}
"""The same as in `test_tiered_gpu`."""


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    return prompts_of(LENGTHS.values())


def logits_of(engine: EmbeddedEngine, prompts: Mapping[str, tuple[int, ...]], hosted: Hosted | None) -> dict[str, Tensor]:
    """Return the logits of each prompt's last token. All prompts advance together."""
    book = PageBook.of(engine, {name: len(tokens) for name, tokens in prompts.items()})
    found: dict[str, Tensor] = {}
    for begin in range(0, max(map(len, prompts.values())), CHUNK):
        items: list[PrefillItem] = []
        for name, tokens in prompts.items():
            if begin < len(tokens):
                is_last = begin + CHUNK >= len(tokens)
                part = tokens[begin : begin + CHUNK]
                if hosted is not None:
                    items.append(hosted.item(name, part, begin, book, is_last=is_last))
                else:
                    tables = book.at(name, begin)
                    items.append(
                        PrefillItem(request_id=name, token_ids=part, first_token=begin, page_tables=tables, is_last=is_last)
                    )
        logits = engine.logits(engine.prefill_batch(items))
        ended = [item.request_id for item in items if item.is_last]
        if logits is not None:
            found |= dict(zip(ended, logits.float().cpu(), strict=True))
    return found


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16], ids=str)
@pytest.mark.parametrize("family", MODELS)
def test_logits_are_those_of_the_device_alone(model: Directory, prompts: Prompts, family: str, dtype: DType) -> None:
    files = read_model_files(model(family))
    shard = Shard(page_size=4)

    def engine() -> EmbeddedEngine:
        num_pages = pages_for(layer_groups(files.layout()), 160)
        return EmbeddedEngine(files, shard=shard, num_pages=num_pages, device=DEVICE, dtype=dtype)

    own = {name: prompts[length] for name, length in LENGTHS.items()}
    wanted = logits_of(engine(), own, None)
    other = engine()
    found = logits_of(other, own, Hosted(other, {name: LENGTHS[name] for name in HOSTED}, pages_per_block=3))
    assert found.keys() == wanted.keys() == own.keys()
    for name in own:
        torch.testing.assert_close(found[name], wanted[name], atol=TOLERANCES[dtype] * float(wanted[name].abs().max()), rtol=0)


def test_a_chunk_is_reported_after_its_bytes_are_in_host_memory(model: Directory, prompts: Prompts) -> None:
    """A separate stream writes host pages, so the event of a layer must be recorded after these writes."""
    files = read_model_files(model("gemma2"))
    engine = EmbeddedEngine(
        files,
        shard=Shard(page_size=4),
        num_pages=pages_for(layer_groups(files.layout()), 160),
        device=DEVICE,
        layers_per_group=1,
    )
    hosted = Hosted(engine, {"a": 64}, pages_per_block=3)
    book = PageBook.of(engine, {"a": 64})
    part = hosted.host.part(hosted.group)
    seen: list[int] = []

    def on_layers_written(layers_done: int, event: torch.cuda.Event | None) -> None:
        if event is not None:
            event.synchronize()
        for layer in (one for one in part.layers if one < layers_done):
            assert not part.buffer(layer, is_v=False)[hosted.tables["a"]].isnan().any(), f"layer {layer}"
        seen.append(layers_done)

    engine.prefill([hosted.item("a", prompts[64], 0, book, is_last=True)], on_layers_written)
    assert seen == list(range(1, engine.layout.num_layers + 1))
