"""Documents name existing files, headings, tests and make targets, and ADRs are numbered without gaps."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parents[2]
ADR_NAME = re.compile(r"^(\d{4})-[a-z0-9]+(-[a-z0-9]+)*\.md$")
ADR_SECTIONS = ["Context", "Decision", "Evidence", "Rejected"]
FENCE = re.compile(r"^(```|~~~).*?^\1\s*$", re.MULTILINE | re.DOTALL)
INLINE_CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"\[[^\]]*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
REFERENCE = re.compile(r"^\[[^\]]+\]:\s*(\S+)", re.MULTILINE)
HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*$", re.MULTILINE)


def _documents() -> list[Path]:
    places = [ROOT, *(place for place in ROOT.iterdir() if place.is_dir() and not place.name.startswith((".", "_")))]
    found = {file for place in places for file in (place.glob("*.md") if place == ROOT else place.rglob("*.md"))}
    return sorted(found)


def _anchors(text: str) -> set[str]:
    """Return the ids of `a` elements, and GitHub's anchors of headings: lower case, no punctuation, hyphens for spaces."""
    anchors = set(re.findall(r'<a id="([^"]+)">', text))
    for heading in HEADING.findall(FENCE.sub("", text)):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        numbered, repeat = slug, 0
        while numbered in anchors:
            repeat += 1
            numbered = f"{slug}-{repeat}"
        anchors.add(numbered)
    return anchors


def broken_links(document: Path, text: str) -> list[str]:
    """Return the relative links of `text` without a target, as seen from `document`."""
    prose = INLINE_CODE.sub("", FENCE.sub("", text))
    broken = []
    for target in [*LINK.findall(prose), *REFERENCE.findall(prose)]:
        if re.match(r"^[a-z][a-z0-9+.-]*:", target):
            continue
        path, _, anchor = unquote(target).partition("#")
        file = document if not path else (ROOT / path[1:] if path.startswith("/") else document.parent / path)
        if path and not file.exists():
            broken.append(f"{target}: no such file")
        elif anchor and file.suffix == ".md":
            content = text if file == document else file.read_text(encoding="utf-8")
            if anchor not in _anchors(content):
                broken.append(f"{target}: no such heading")
    return broken


def test_relative_links_resolve() -> None:
    found = {document: broken_links(document, document.read_text(encoding="utf-8")) for document in _documents()}
    assert {file.relative_to(ROOT).as_posix(): broken for file, broken in found.items() if broken} == {}


def test_documents_that_other_files_name_exist() -> None:
    """Help, errors, alerts and comments write the path of a document from the root, some with the anchor of a heading."""
    suffixes = {".env", ".html", ".proto", ".py", ".service", ".sh", ".toml", ".yaml", ".yml"}
    places = [place for place in ROOT.iterdir() if place.is_dir() and not place.name.startswith((".", "_"))]
    files = [
        ROOT / "Makefile",
        ROOT / "pyproject.toml",
        *(file for place in places for file in place.rglob("*") if file.suffix in suffixes),
    ]
    missing = []
    for file in files:
        for path, _, anchor in re.findall(
            r"\b((?:docs|deploy)/(?:adr/|models/)?[\w.-]+\.md)(#([\w-]+))?", file.read_text(encoding="utf-8")
        ):
            document = ROOT / path
            if not document.is_file() or (anchor and anchor not in _anchors(document.read_text(encoding="utf-8"))):
                missing.append(f"{file.relative_to(ROOT)}: {path}{'#' if anchor else ''}{anchor}")
    assert missing == []


def test_tests_that_documents_name_exist() -> None:
    """Documents write `test_name`, `tests/path.py` or `tests/path.py::test_name`, or list the tests in a comment."""
    files = list((ROOT / "tests").rglob("*.py"))
    code = "\n".join(file.read_text(encoding="utf-8") for file in files)
    known = {*re.findall(r"^ *(?:async )?def (test_\w+)", code, re.M), *(file.stem for file in files)}
    missing = []
    for document in _documents():
        text = document.read_text(encoding="utf-8")
        if document.name == "CHANGELOG.md":  # names removed tests
            continue
        named = {*re.findall(r"`(test_\w+)(?:\.py)?`", text), *" ".join(re.findall(r"<!-- tests: (.+) -->", text)).split()}
        missing += [f"{document.relative_to(ROOT)}: {name}" for name in sorted(named - known)]
        paths = {path for path in re.findall(r"\btests/[\w/]+\.py\b", text) if not (ROOT / path).is_file()}
        missing += [f"{document.relative_to(ROOT)}: {path}" for path in sorted(paths)]
        for path, name in re.findall(r"\b(tests/[\w/]+\.py)::(\w+)", text):
            defines = rf"^(?:(?:async )?(?:def|class) {name}\b|{name} = )"
            if path not in paths and not re.search(defines, (ROOT / path).read_text(encoding="utf-8"), re.M):
                missing.append(f"{document.relative_to(ROOT)}: {path}::{name}")
    assert missing == []


def test_security_names_a_test_for_all_that_an_attacker_cannot_do() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    tables = re.findall(r"^\| cannot[^|\n]* \| shown by \|\n\|---\|---\|\n((?:\|.*\n)+)", text, re.M)
    assert len(tables) == len(re.findall(r"^\| cannot", text, re.M))
    shown = {what: "`test_" in tests for _, what, tests, _ in (row.split("|") for table in tables for row in table.splitlines())}
    assert len(shown) > 20
    assert [what for what, is_shown in shown.items() if not is_shown] == []


def test_make_targets_that_documents_name_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    named = {
        (document.name, target)
        for document in _documents()
        if document.name != "CHANGELOG.md"
        for target in re.findall(r"(?:`|^\$ |^)make ([a-z-]+)(?=[`\s])", document.read_text(encoding="utf-8"), re.M)
    }
    assert {target for _, target in named} >= {"test", "check", "demo"}
    assert {(name, target) for name, target in named if target not in targets} == set()


def _adrs() -> list[Path]:
    return sorted(file for file in (ROOT / "docs" / "adr").glob("*.md") if file.name != "README.md")


def test_adrs_are_numbered_without_gaps() -> None:
    names = [file.name for file in _adrs()]
    assert names and all(ADR_NAME.match(name) for name in names), names
    assert [int(name[:4]) for name in names] == list(range(1, len(names) + 1))


def test_each_adr_has_its_number_and_sections() -> None:
    for adr in _adrs():
        text = adr.read_text(encoding="utf-8")
        assert text.startswith(f"# {adr.name[:4]}: "), adr.name
        assert re.findall(r"^## (.+)$", text, re.MULTILINE) == ADR_SECTIONS, adr.name


def test_adr_index_lists_every_adr_by_its_title() -> None:
    index = (ROOT / "docs" / "adr" / "README.md").read_text(encoding="utf-8")
    titles = {file.name: file.read_text(encoding="utf-8").splitlines()[0].partition(": ")[2] for file in _adrs()}
    assert dict(re.findall(r"^- \[\d{4}\]\((\S+)\): (.+)$", index, re.MULTILINE)) == titles
