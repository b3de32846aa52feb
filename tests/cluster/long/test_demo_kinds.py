"""Demo models of every kind: greedy decoding from a copy of a request's KV changes when anything of it is damaged.

What is held here for windows, latents and states is held for the Llama in tests/embedded_engine/test_hand_over.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from embedded_engine.engine import EmbeddedEngine
from embedded_engine.model_files import read_model_files
from kvferry.demo.kinds import NUM_KV_HEADS, NUM_LAYERS, WINDOW_TOKENS, ModelKind
from kvferry.demo.model import make_demo_model
from kvferry.demo.prompts import BUILT_IN
from transfer.engine_types import GREEDY, DecodeItem, PrefillItem
from transfer.layer_groups import GroupKind, LayerGroup, layer_groups
from transfer.layout import LayerKind, Shard
from transfer.pool.kv_pool import KVPool

NUM_TOKENS = 48
PAGE_SIZE = 16
BATCH = 32
CHUNK_TOKENS = 60
NEW_KINDS = (ModelKind.SLIDING, ModelKind.MLA, ModelKind.HYBRID)
LATENT_PART = 16  # elements; the last part is the rotary key
RECURRENT = slice(0, 2 * 16 * 16)  # of a key head's state; behind it what the convolution keeps
CONVOLUTION = slice(RECURRENT.stop, None)
TEXTS = (BUILT_IN[7], BUILT_IN[3])  # 132 tokens, more than twice the window, and 30

Damage = Callable[["Patient", int], None]
"""Harms the copy of this number."""


class Patient:
    """One prompt's KV in a pool, as copy 0; `outcomes` decodes from damaged copies of it, many at a time."""

    def __init__(self, directory: Path, text: str = TEXTS[0]) -> None:
        self.token_ids = tuple(AutoTokenizer.from_pretrained(directory)(text)["input_ids"])
        self.length = len(self.token_ids)
        self.num_pages = -(-(self.length + NUM_TOKENS) // PAGE_SIZE)
        groups = layer_groups(read_model_files(directory).layout())
        num_pages = [(BATCH + 1) * self._entries(group) for group in groups]
        self.engine = EmbeddedEngine(directory, shard=Shard(page_size=PAGE_SIZE), num_pages=num_pages)
        self.pool: KVPool = self.engine.pool
        for begin in range(0, self.length, CHUNK_TOKENS):
            part = self.token_ids[begin : begin + CHUNK_TOKENS]
            is_last = begin + CHUNK_TOKENS >= self.length
            item = PrefillItem(
                request_id="a", token_ids=part, first_token=begin, page_tables=self.tables(0), sampling=GREEDY, is_last=is_last
            )
            first = self.engine.prefill([item])
        self.first = first["a"]

    def _entries(self, group: LayerGroup) -> int:
        return 1 if group.kind is GroupKind.STATE else self.num_pages

    def pages(self, layer: int, copy: int) -> slice:
        count = self._entries(self.pool.groups[self.pool.group_of(layer)])
        return slice(copy * count, (copy + 1) * count)

    def tables(self, copy: int) -> tuple[range, ...]:
        return tuple(range(copy * self._entries(group), (copy + 1) * self._entries(group)) for group in self.pool.groups)

    def buffers(self, layer: int) -> list[Tensor]:
        return [self.pool.buffer(layer, is_v=is_v) for is_v in (False, True)[: self.pool.layout.layers[layer].num_buffers]]

    def outcomes(self, damages: Mapping[str, Damage]) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        names = list(damages)
        for begin in range(0, len(names), BATCH):
            batch = {name: copy for copy, name in enumerate(names[begin : begin + BATCH], start=1)}
            for name, copy in batch.items():
                for layer in range(self.pool.layout.num_layers):
                    for buffer in self.buffers(layer):
                        buffer[self.pages(layer, copy)] = buffer[self.pages(layer, 0)]
                damages[name](self, copy)
            found |= self._decode(batch)
        return found

    def _decode(self, copies: Mapping[str, int]) -> dict[str, list[int]]:
        tokens = {name: [self.first] for name in copies}
        for step in range(NUM_TOKENS - 1):
            items = [
                DecodeItem(
                    request_id=name,
                    token_id=tokens[name][-1],
                    position=self.length + step,
                    page_tables=self.tables(copy),
                    sampling=GREEDY,
                )
                for name, copy in copies.items()
            ]
            for name, token in self.engine.decode(items).items():
                tokens[name].append(token)
        return tokens

    def unseen(self, damages: Mapping[str, Damage]) -> list[str]:
        """Those of the damages that change no token."""
        outcomes = self.outcomes({"intact": untouched, **damages})
        return [name for name in damages if outcomes[name] == outcomes["intact"]]

    def layers_of(self, kind: LayerKind) -> list[int]:
        return [layer for layer, spec in enumerate(self.pool.layout.layers) if spec.kind is kind]


def untouched(patient: Patient, copy: int) -> None:
    pass


def without(layer: int, head: int, elements: slice = slice(None)) -> Damage:
    def damage(patient: Patient, copy: int) -> None:
        for buffer in patient.buffers(layer):
            buffer[patient.pages(layer, copy), :, head, elements] = 0

    return damage


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[ModelKind], Path]:
    parent = tmp_path_factory.mktemp("kinds")

    def directory(kind: ModelKind) -> Path:
        return parent / kind if (parent / kind).exists() else make_demo_model(parent / kind, kind=kind)

    return directory


Directory = Callable[[ModelKind], Path]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_every_kv_head_of_windows_and_full_layers_matters(directory_of: Directory) -> None:
    patient = Patient(directory_of(ModelKind.SLIDING))
    assert patient.length > 2 * WINDOW_TOKENS
    layers = [*patient.layers_of(LayerKind.SLIDING_WINDOW), *patient.layers_of(LayerKind.ATTENTION)]
    assert len(layers) == NUM_LAYERS
    heads = {f"layer {layer} head {head}": without(layer, head) for layer in layers for head in range(NUM_KV_HEADS)}
    assert patient.unseen(heads) == []


def test_every_part_of_a_latent_matters(directory_of: Directory) -> None:
    patient = Patient(directory_of(ModelKind.MLA))
    size = patient.pool.layout.layers[0].k_head_dim
    parts = {
        f"layer {layer} from element {begin}": without(layer, 0, slice(begin, begin + LATENT_PART))
        for layer in patient.layers_of(LayerKind.MLA)
        for begin in range(0, size, LATENT_PART)
    }
    assert len(parts) == NUM_LAYERS * 7
    assert patient.unseen(parts) == []


def test_every_head_of_states_and_full_layers_matters(directory_of: Directory) -> None:
    patient = Patient(directory_of(ModelKind.HYBRID))
    layers = [*patient.layers_of(LayerKind.RECURRENT_STATE), *patient.layers_of(LayerKind.ATTENTION)]
    assert len(layers) == NUM_LAYERS
    heads = {f"layer {layer} head {head}": without(layer, head) for layer in layers for head in range(NUM_KV_HEADS)}
    assert patient.unseen(heads) == []


def test_both_parts_of_a_state_matter(directory_of: Directory) -> None:
    """In the first and in the last layer, for one prompt or another: some heads forget within a few tokens."""
    patients = [Patient(directory_of(ModelKind.HYBRID), text) for text in TEXTS]
    layers = patients[0].layers_of(LayerKind.RECURRENT_STATE)
    parts = {
        f"layer {layer} head {head} {name}": without(layer, head, elements)
        for layer in (layers[0], layers[-1])
        for head in range(NUM_KV_HEADS)
        for name, elements in (("recurrent", RECURRENT), ("convolution", CONVOLUTION))
    }
    unseen = patients[0].unseen(parts)
    assert len(unseen) < len(parts) / 10
    assert patients[1].unseen({name: parts[name] for name in unseen}) == []


@pytest.mark.parametrize("kind", NEW_KINDS)
def test_an_undamaged_copy_says_what_one_process_says(directory_of: Directory, kind: ModelKind) -> None:
    directory = directory_of(kind)
    patient = Patient(directory)
    tokens = patient.outcomes({"copy": untouched})["copy"]
    loader: Any = AutoModelForCausalLM
    model = loader.from_pretrained(directory, local_files_only=True).eval()
    ids = torch.tensor([patient.token_ids])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=2)
    assert tokens == output[0, patient.length :].tolist(), "the model's own end token has not come either"
    assert len(set(tokens)) > NUM_TOKENS / 2, "a generation that repeats itself proves little"
    spoken = AutoTokenizer.from_pretrained(directory).decode(tokens)
    assert spoken.isascii() and spoken.isprintable() and len(spoken.split()) > NUM_TOKENS / 3
