"""From settings to an engine, of either role."""

from __future__ import annotations

from pathlib import Path

from embedded_engine.loading import load_engine
from tests.runtime.instances import decode_config, prefill_config


def test_only_a_prefill_node_cuts_its_layers_into_groups(demo_dir: Path, tmp_path: Path) -> None:
    prefill = load_engine(prefill_config(demo_dir, chunk={"layers_per_group": 3}), rank=0, rendezvous=tmp_path / "prefill")
    decode = load_engine(decode_config(demo_dir), rank=0, rendezvous=tmp_path / "decode")
    try:
        assert prefill._layers_per_group == 3
        assert decode._layers_per_group == decode.layout.num_layers
    finally:
        prefill.close()
        decode.close()
