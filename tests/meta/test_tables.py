"""`docs.tables` rewrites only the marked regions of a document, and reports stale regions as differences."""

from __future__ import annotations

from pathlib import Path

from docs.tables import differences, kept, table, with_regions

PAGE = "# T\n\n<!-- begin codes: written by make docs -->\n| name | code |\n|---|---|\n| `B` | 7 |\n<!-- end codes -->\n\nText.\n"


def codes(rows: list[list[str]]) -> list[list[str]]:
    return [[name, str(number)] for number, (name, _) in enumerate(kept(rows, ["B"]))]


def test_a_stale_region_is_reported_and_rewritten_and_the_rest_stays(tmp_path: Path) -> None:
    wanted = with_regions(PAGE, {"codes": table(codes)})
    assert wanted == PAGE.replace("| 7 |", "| 0 |") == with_regions(wanted, {"codes": table(codes)})
    file = tmp_path / "page.md"
    file.write_text(PAGE)
    (found,) = differences({file: wanted})
    assert "-| `B` | 7 |\n+| `B` | 0 |" in found
    assert differences({file: PAGE}) == []
