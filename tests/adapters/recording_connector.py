"""A KV connector that moves nothing and writes down what vLLM tells it; loaded by vLLM, see record_vllm.py."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any, ClassVar

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from kvferry.engines.vllm_facts import read_facts


class RecordingConnector(KVConnectorBase_V1):
    """Keeps the registered tensors, and the blocks of the last prompt, for the process that it is in."""

    caches: ClassVar[dict[str, torch.Tensor]] = {}
    block_ids: ClassVar[tuple[list[int], ...]] = ()

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._place = Path(os.environ["KVFERRY_RECORD_DIRECTORY"])
        self._configs = (vllm_config, kv_cache_config)
        if role is KVConnectorRole.SCHEDULER:
            groups = [
                {"layer_names": list(group.layer_names), "spec": repr(group.kv_cache_spec)}
                for group in kv_cache_config.kv_cache_groups
            ]
            self._write("scheduler", {"facts": self._facts(), "kv_cache_groups": groups})

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        type(self).caches = kv_caches
        facts = self._facts()
        first = next(iter(kv_caches.values()))
        assert all(cache.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() for cache in kv_caches.values())
        tensors = {
            name: {
                "dtype": str(cache.dtype).removeprefix("torch."),
                "shape": list(cache.shape),
                "stride": list(cache.stride()),
                "offset": cache.storage_offset(),
            }
            for name, cache in kv_caches.items()
        }
        rank = facts["pp_rank"] * facts["tp_size"] + facts["tp_rank"]
        storage = {"storage_bytes": first.untyped_storage().nbytes(), "device": str(first.device)}
        self._write(f"rank{rank}", {"facts": facts, "tensors": tensors, **storage})

    def _facts(self) -> dict[str, Any]:
        return dataclasses.asdict(read_facts(*self._configs))

    def _write(self, name: str, value: object) -> None:
        (self._place / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")

    # What follows is what vLLM asks of any connector; nothing is ever moved.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        type(self).block_ids = blocks.get_block_ids()

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...


class RecordingConnectorOfGroups(RecordingConnector, SupportsHMA):
    """With it vLLM keeps its hybrid KV cache manager on: several groups of layers, each with a block table of its own."""

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return False, None
