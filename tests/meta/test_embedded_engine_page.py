"""docs/embedded-engine.md names the families that the engine runs, and which of them are cut."""

from __future__ import annotations

import re
from pathlib import Path

from embedded_engine.architectures import ARCHITECTURES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "embedded-engine.md"


def test_the_table_has_every_family_and_no_other() -> None:
    rows = re.findall(r"^\| `(\w+)` \| .+ \| (yes|no)[^|]* \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert dict(rows) == {name: "yes" if family.is_cut else "no" for name, family in ARCHITECTURES.items()}
