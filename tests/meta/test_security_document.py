"""SECURITY.md says what the code does: limits are the code's, and tests that show something are there."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
ATTACKERS = ("Network attacker", "Hostile prefill node", "Hostile decode node", "Hostile client", "Local user")


def section(heading: str) -> str:
    found = re.search(rf"^## {re.escape(heading)}.*?\n(.*?)(?=^## |\Z)", TEXT, re.M | re.S)
    assert found is not None, f"no section {heading}"
    return found[1]


def rows(text: str) -> list[list[str]]:
    """Cells of a section's table, without its header."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def named_in(text: str) -> set[str]:
    return set(re.findall(r"`(test_\w+)`", text))


def all_tests() -> set[str]:
    found: set[str] = set()
    for file in (ROOT / "tests").rglob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        found |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    return found


LIMITS = rows(section("Limits of messages"))


def test_every_test_that_is_named_is_there() -> None:
    missing = named_in(TEXT) - all_tests()
    assert not missing


@pytest.mark.parametrize("attacker", ATTACKERS)
def test_what_an_attacker_cannot_do_is_shown(attacker: str) -> None:
    table = rows(section(attacker))
    assert {row[0] for row in table} == {"can", "cannot"}
    unshown = [row[1] for row in table if row[0] == "cannot" and not named_in(row[2])]
    assert not unshown


@pytest.mark.parametrize("row", LIMITS, ids=lambda row: row[1][:40])
def test_a_limit_is_that_of_the_code(row: list[str]) -> None:
    _, what, limit, constant, shown_by = row
    assert named_in(shown_by), f"{what}: shown by nothing"
    if not constant:
        assert not re.match(r"[\d,]+ ", limit), f"{what}: a number without its constant"
        return
    module, _, name = constant.strip("`").rpartition(".")
    assert int(limit.split()[0].replace(",", "")) == getattr(importlib.import_module(module), name)


def test_every_constant_that_bounds_what_a_peer_sends_is_told() -> None:
    files = ("messages.py", "control/base.py", "registry/options.py", "registry/convert.py", "registry/status.py")
    text = "\n".join((ROOT / "transfer" / file).read_text(encoding="utf-8") for file in files)
    text += (ROOT / "node_runtime" / "transfer_ids.py").read_text(encoding="utf-8")
    text += (ROOT / "node_runtime" / "prompt.py").read_text(encoding="utf-8")
    told = {row[3].strip("`").rpartition(".")[2] for row in LIMITS}
    follows_from_others = {"MAX_TRANSFER_ID_BYTES", "_MAX_POSITION"}
    assert set(re.findall(r"^(_?MAX_[A-Z_]+)(?:: Final)? = ", text, re.M)) - follows_from_others <= told
