"""docs/protocol.md: each numbered rule has a test of its number, and every test that the page names exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
RULES = [*map(str, range(1, 15)), *(f"R{number}" for number in range(1, 7))]


def named_tests(pattern: str) -> set[str]:
    files = (ROOT / "tests").glob(pattern)
    return {name for file in files for name in re.findall(r"^(?:async )?def (test_\w+)", file.read_text(encoding="utf-8"), re.M)}


def test_every_rule_has_its_tests_and_every_numbered_test_its_rule() -> None:
    rows = re.findall(r"^\| (R?\d+) \|(.*)$", TEXT.split("## Rules\n")[1].split("\n## ")[0], re.M)
    documented = {rule: set(re.findall(r"`(test_\w+)`", row)) for rule, row in rows}
    assert list(documented) == RULES
    found: dict[str, set[str]] = {rule: set() for rule in RULES}
    for test in named_tests("protocol/test_*rules.py"):
        match = re.match(r"test_(?:rule_0*(\d+)|(R\d))_", test)
        assert match, f"{test} carries no number of a rule"
        found[match[1] or match[2]].add(test)
    assert found == documented


def test_the_tests_that_the_page_names_exist() -> None:
    named = set(re.findall(r"`(test_\w+)`", TEXT))
    assert len(named) > 60
    assert named - {"test_RN_", "test_rule_NN_"} <= named_tests("**/*.py")
