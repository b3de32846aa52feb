"""The identity of LoRA adapters, from directories like those that vLLM loads."""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.engines.vllm_adapters import MAX_NAME_CHARS, VllmAdapters
from transfer.connector.prompt import check_cache_salt


def adapter(directory: Path, *, weights: bytes = b"weights", name: str = "adapter_model.safetensors") -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text('{"r": 8}', encoding="utf-8")
    (directory / name).write_bytes(weights)
    return directory


def lora(path: Path | str, *, name: str = "sql", number: int = 1, **changes: Any) -> Any:
    """vLLM's LoRARequest."""
    plain = {"lora_name": name, "lora_int_id": number, "lora_path": str(path), "load_inplace": False, "is_3d_lora_weight": False}
    return SimpleNamespace(**plain | changes)


def salt(lora_request: Any) -> str:
    """Salt of an adapter that an instance meets for the first time."""
    adapters = VllmAdapters()
    assert adapters.problem(lora_request) == ""
    return adapters.salt(lora_request)


def test_a_request_without_an_adapter_has_no_salt() -> None:
    assert salt(None) == ""


def test_a_salt_depends_on_name_and_files_but_not_on_place_and_number(tmp_path: Path) -> None:
    first = adapter(tmp_path / "a")
    ours = salt(lora(first))
    assert ours.startswith("lora:") and ours.endswith(":sql")
    assert salt(lora(adapter(tmp_path / "b"), number=7)) == ours
    others = [
        lora(first, name="chat"),
        lora(first, is_3d_lora_weight=True),
        lora(adapter(tmp_path / "c", weights=b"weightS")),
        lora(adapter(tmp_path / "d", name="adapter_model.bin", weights=b"others")),
    ]
    (adapter(tmp_path / "e") / "adapter_config.json").write_text('{"r": 16}', encoding="utf-8")
    salts = {ours, *(salt(one) for one in others), salt(lora(tmp_path / "e"))}
    assert len(salts) == 6


def test_the_longest_name_fits_the_salt(tmp_path: Path) -> None:
    longest = salt(lora(adapter(tmp_path / "a"), name="n" * MAX_NAME_CHARS))
    check_cache_salt(longest)
    assert len(longest) == 128


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": "n" * (MAX_NAME_CHARS + 1)}, f"at most {MAX_NAME_CHARS} characters"),
        ({"name": "\ud800"}, "UTF-8"),
        ({"load_inplace": True}, "adapter sql was loaded in place, so its revision is unknown"),
        ({"path": "nowhere/at-all"}, "revision of its LoRA adapter sql is unknown: .* has none of adapter_model.safetensors"),
    ],
)
def test_an_adapter_without_a_known_revision_is_named(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    fields: dict[str, Any] = {"path": adapter(tmp_path / "a")} | changes
    problem = VllmAdapters().problem(lora(**fields))
    assert re.search(said, problem), problem


def test_files_that_change_after_the_first_request_stop_the_adapter_until_it_is_loaded_again(tmp_path: Path) -> None:
    """vLLM may read them again, so nobody knows which of both are in use."""
    adapters, path = VllmAdapters(), adapter(tmp_path / "a")
    assert adapters.problem(lora(path)) == ""
    before = adapters.salt(lora(path))
    weights = path / "adapter_model.safetensors"
    original = weights.stat()
    weights.write_bytes(b"WEIGHTS")
    os.utime(weights, ns=(original.st_atime_ns, original.st_mtime_ns + 1))
    assert "have changed" in adapters.problem(lora(path))
    weights.write_bytes(b"weights")
    os.utime(weights, ns=(original.st_atime_ns, original.st_mtime_ns))
    assert "have changed" in adapters.problem(lora(path)), "vLLM may have read the others in between"
    weights.write_bytes(b"WEIGHTS")
    assert adapters.problem(lora(path, number=2)) == ""
    assert adapters.salt(lora(path, number=2)) != before
