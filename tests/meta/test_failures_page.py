"""docs/operations.md has a section for each failure, and each is shown by tests on real processes: none of either is missing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
SECTIONS = dict(
    re.findall(
        r"^### (.+?)\n(.*?)(?=^###? |\Z)", PAGE.split("## Failures, one by one\n")[1].split("\n## ")[0] + "\n", re.M | re.S
    )
)
PARTS = ("**You see.**", "**By itself.**", "**To do.**")
FAULTS = (
    "client", "deadline", "engine", "rank dies", "leader dies", "same address", "stands still", "cut", "reset", "loses packets",
    "lost, repeated or reordered", "ring is full", "pool",
)  # fmt: skip


def named(section: str) -> list[str]:
    """Tests that a section names."""
    (line,) = re.findall(r"<!-- tests: (.+) -->", section)
    return line.split()


def chaos_tests() -> set[str]:
    files = (ROOT / "tests" / "chaos").glob("test_*.py")
    return {name for file in files for name in re.findall(r"^async def (test_\w+)", file.read_text(encoding="utf-8"), re.M)}


def test_every_fault_has_its_section() -> None:
    for fault in FAULTS:
        assert any(fault in heading for heading in SECTIONS), fault


@pytest.mark.parametrize("heading", SECTIONS)
def test_a_section_says_what_is_seen_what_happens_and_what_to_do(heading: str) -> None:
    section = SECTIONS[heading]
    places = [section.find(part) for part in PARTS]
    assert -1 not in places and places == sorted(places), f"{heading}: {PARTS} in this order"
    ends = [*places[1:], len(section)]
    for part, begin, end in zip(PARTS, places, ends, strict=True):
        assert section[begin + len(part) : end].strip(), f"{heading}: nothing behind {part}"


def test_every_chaos_test_shows_a_section_and_every_section_is_shown() -> None:
    shown = [name for section in SECTIONS.values() for name in named(section)]
    assert sorted(shown) == sorted(chaos_tests())


def test_the_events_that_sections_name_are_logged() -> None:
    """A word in backticks that looks like an event is one that some log call says."""
    sources = [
        path for room in ("decode_node", "prefill_node", "node_runtime", "transfer") for path in (ROOT / room).rglob("*.py")
    ]
    logged = {
        name
        for path in sources
        for name in re.findall(
            r'log\.(?:debug|info|warning|error|critical|exception)\(\s*"(\w+)"', path.read_text(encoding="utf-8")
        )
    }
    assert len(logged) > 20
    for heading, section in SECTIONS.items():
        events = {word for word in re.findall(r"`([a-z]+(?:_[a-z]+)+)`", section) if not word.startswith("kvferry_")}
        assert events <= logged, f"{heading}: {sorted(events - logged)}"
