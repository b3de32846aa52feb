"""The walks in docs/architecture.md name functions that exist and that call each other as the tables say.

A row names a function and the word by which it passes the work on: the name of the next row's function, or the message,
event, action or value that both mention, or "returns". A function that is renamed, moved or bypassed makes its row fail.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
ROW = re.compile(r"^\| [^|]+ \| `(?P<file>[\w/]+\.py)` `(?P<function>[\w.]+)` \| `?(?P<word>\w*)`? \|$", re.MULTILINE)
WALKS = ("The walk of a chunk", "The walk of a `Generate` call")


@dataclass(frozen=True, slots=True)
class Step:
    file: str
    function: str
    word: str

    @property
    def name(self) -> str:
        return self.function.rpartition(".")[2]

    @property
    def source(self) -> str:
        text, functions = functions_of(self.file)
        return (ast.get_source_segment(text, functions[self.function]) or "") if self.function in functions else ""


@cache
def functions_of(file: str) -> tuple[str, dict[str, ast.AST]]:
    """The file's text, and its functions by qualified name."""
    text = (ROOT / file).read_text()
    found: dict[str, ast.AST] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                name = f"{prefix}{child.name}"
                if not isinstance(child, ast.ClassDef):
                    found[name] = child
                visit(child, f"{name}.")
            else:
                visit(child, prefix)

    visit(ast.parse(text), "")
    return text, found


def section(heading: str) -> str:
    begin = PAGE.index(f"### {heading}\n")
    return PAGE[begin : PAGE.index("\n#", begin + 4)]


def walk(heading: str) -> list[Step]:
    return [Step(row["file"], row["function"], row["word"]) for row in ROW.finditer(section(heading))]


def has_word(word: str, text: str) -> bool:
    return re.search(rf"\b{word}\b", text) is not None


@pytest.mark.parametrize("heading", WALKS)
def test_each_step_passes_the_work_on_as_the_page_says(heading: str) -> None:
    steps = walk(heading)
    broken = []
    for step, following in pairwise(steps):
        if not step.source:
            broken.append(f"{step.file} has no {step.function}")
        elif step.word == "returns":
            continue
        elif not has_word(step.word, step.source):
            broken.append(f"{step.function} does not mention {step.word}")
        elif step.word.lstrip("_") != following.name.lstrip("_") and not has_word(step.word, following.source):
            broken.append(f"{following.function} is not {step.word}, and does not mention it")
    assert not broken
    assert not steps[-1].word and steps[-1].source, "the last step passes nothing on"


@pytest.mark.parametrize("heading", WALKS)
def test_the_page_counts_files_and_calls(heading: str) -> None:
    steps = walk(heading)
    assert f"{len({step.file for step in steps})} files, {len(steps)} calls" in section(heading)
