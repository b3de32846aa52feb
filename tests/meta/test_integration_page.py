"""docs/integration.md shows the engine that runs, names what exists, and that engine notices KV that did not arrive."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

import decode_node.engine.base as decode_base
import prefill_node.engine.base as prefill_base
from embedded_engine.loading import load_engine
from tests.runtime.instances import decode_config, prefill_config
from transfer.engine_types import DecodeItem, PrefillItem, RequestFault

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "integration.md").read_text(encoding="utf-8")
EXAMPLE = ROOT / "examples" / "toy_engine.py"


@pytest.fixture(scope="module")
def toy() -> ModuleType:
    spec = importlib.util.spec_from_file_location("toy_engine", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_shows_the_engine_that_runs() -> None:
    _, shown = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert "class ToyEngine" in shown and "def load(" in shown
    assert shown in EXAMPLE.read_text(encoding="utf-8")


def test_page_and_both_docstrings_have_the_loaders_signature(toy: ModuleType) -> None:
    names = ["config", "rank", "rendezvous"]
    assert list(inspect.signature(toy.load).parameters) == list(inspect.signature(load_engine).parameters) == names
    assert "def load(config: NodeConfig, *, rank: int, rendezvous: Path) -> PrefillEngine | DecodeEngine" in PAGE
    for module, role in ((prefill_base, "Prefill"), (decode_base, "Decode")):
        assert f"def load(config: {role}NodeConfig, *, rank: int, rendezvous: Path) -> {role}Engine" in (module.__doc__ or "")


def test_every_member_of_both_protocols_is_on_the_page() -> None:
    for protocol in (prefill_base.PrefillEngine, decode_base.DecodeEngine):
        members = {name for name in vars(protocol) if not name.startswith("_")}
        assert members
        assert [name for name in sorted(members) if not re.search(rf"`{name}[`(]", PAGE)] == []


def test_every_module_and_name_on_the_page_exists() -> None:
    named = set(re.findall(r"`(transfer(?:\.\w+)+)`", PAGE)) | set(re.findall(r"`(transfer(?:\.\w+)+)\(", PAGE))
    assert len(named) > 8
    for path in named:
        parts = path.split(".")
        for cut in range(len(parts), 0, -1):
            if _is_module(".".join(parts[:cut])):
                found: object = importlib.import_module(".".join(parts[:cut]))
                for name in parts[cut:]:
                    found = getattr(found, name)
                break


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def test_the_toy_engine_tells_damaged_kv_from_whole(toy: ModuleType, tmp_path: Path) -> None:
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
