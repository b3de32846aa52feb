"""The engine of examples/toy_engine.py, which docs/integration.md includes, reports KV that changed in transfer."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path

import pytest

from embedded_engine.loading import load_engine
from tests.runtime.instances import decode_config, prefill_config
from transfer.engine_types import DecodeItem, PrefillItem, RequestFault


def test_the_toy_engine_reports_damaged_kv_and_serves_the_other_request(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("toy_engine", Path(__file__).resolve().parents[2] / "examples/toy_engine.py")
    assert spec is not None and spec.loader is not None
    toy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(toy)
    assert list(inspect.signature(toy.load).parameters) == list(inspect.signature(load_engine).parameters)

    prompt, pages = tuple(range(5, 45)), {"a": (3, 1, 4), "b": (0, 5, 2)}
    pool = {"num_pages": 8, "page_size": 16}
    engine = toy.load(prefill_config(tmp_path, pool=pool, chunk={"chunk_tokens": 64}), rank=0, rendezvous=tmp_path / "unused")
    reports: list[tuple[int, object]] = []
    items = [
        PrefillItem(request_id=name, token_ids=prompt, first_token=0, page_tables=(table,), is_last=True)
        for name, table in pages.items()
    ]
    first = toy.next_token(prompt)
    assert engine.prefill(items, lambda layers, event: reports.append((layers, event))) == {"a": first, "b": first}
    assert reports == [(1, None), (2, None), (3, None)]

    steps = [DecodeItem(request_id=name, token_id=first, position=40, page_tables=(table,)) for name, table in pages.items()]
    wanted = toy.next_token([*prompt, first])
    assert engine.decode(steps) == {"a": wanted, "b": wanted}
    engine.pool.buffer(2, is_v=True)[1, 7, 3, 0] += 1  # of a: page 1 of its three, token 23
    with pytest.raises(RequestFault) as fault:
        engine.decode(steps)
    assert (fault.value.request_ids, fault.value.tokens) == (("a",), {"b": wanted})
    second = toy.load(decode_config(tmp_path, pool=pool, parallel={"tp_size": 2}), rank=1, rendezvous=tmp_path / "unused")
    assert second.prefill(items) == {} and second.pool.num_heads(0) == 2
