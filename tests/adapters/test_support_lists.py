"""The pages about vLLM and SGLang list the backends, formats and settings that the code accepts or refuses, and only those."""

from __future__ import annotations

import re
from pathlib import Path

from kvferry.engines.sglang_layout import MOVABLE_DTYPES, MOVABLE_POOLS
from kvferry.engines.sglang_settings import SUPPORTED
from kvferry.engines.vllm_facts import INDEXER_ROWS, ROW_FORMATS, read_facts
from kvferry.engines.vllm_layout import DENSE_BACKENDS, LATENT_BACKENDS, PACKED_BACKENDS
from tests.adapters.test_vllm_facts import attention_spec, config, groups

DOCS = Path(__file__).resolve().parents[2] / "docs"
CODE = re.compile(r"`([^`]+)`")


def rows(document: str) -> dict[str, list[str]]:
    """Return the cells of a page's table of what is supported, by the text of their first cell."""
    text = (DOCS / document).read_text(encoding="utf-8")
    section = text[text.index("## What is supported\n") :]
    table = re.findall(r"^\|(.+)\|$", section[: section.find("\n## ", 1)], re.M)
    cells = [[cell.strip() for cell in line.split("|")] for line in table]
    return {re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", first): rest for first, *rest in cells if set(first) - set("-")}


def codes(*cells: str) -> set[str]:
    return {code for cell in cells for code in CODE.findall(cell)}


def test_backends_of_vllm() -> None:
    listed = [cell for first, row in rows("vllm.md").items() if first.endswith("backends") for cell in row]
    assert codes(*listed) == {*PACKED_BACKENDS, *DENSE_BACKENDS, *LATENT_BACKENDS}


def test_row_formats_of_vllm() -> None:
    assert codes(*rows("vllm.md")) & {*ROW_FORMATS} == {*ROW_FORMATS} - {INDEXER_ROWS}


def test_methods_of_speculative_decoding_in_vllm() -> None:
    refused = read_facts(config(speculative_config={"method": "unknown"}), groups(attention_spec()))
    known = refused.features["speculative decoding"].removeprefix("unknown; use ").split(", ")
    assert codes(*rows("vllm.md")["speculative decoding"]) == set(known)


def test_pools_and_element_types_of_sglang() -> None:
    table = rows("sglang.md")
    assert {name for row in table.values() for name in codes(row[0]) if name.endswith("Pool")} == set(MOVABLE_POOLS)
    listed = re.findall(r"\b(?:b?float\d+|fp8_e4m3)\b", table["KV dtype"][0])
    assert {name.replace("fp8_e4m3", "float8_e4m3fn") for name in listed} == {str(dtype) for dtype in MOVABLE_DTYPES}


def test_settings_of_sglang_that_are_refused() -> None:
    listed = [row[0] for first, row in rows("sglang.md").items() if first.startswith("refused at start, setting named")]
    assert codes(*listed) == {name.split()[0] for name in SUPPORTED}
