"""The tool that deletes statements deletes each of them, sees what notices, and cannot be fooled by a mutant that never ran."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutation import deletions
from tests.mutation.deletions import MODULES, ROOT, Memory, Verdict, accepted, deletions_of, file_of, without

SOURCE = '''
"""Module."""

import os

LIMIT = 3


class Box:
    """Holds."""

    size: int = 1

    def put(self, one):
        """Put."""
        if one:
            self.size += 1
        else:
            self.size = 0
        match one:
            case 1:
                return os.sep
            case _:
                pass
        return None
'''


def test_each_statement_goes_once() -> None:
    found = deletions_of("ring", SOURCE)
    assert [one.text for one in found] == [
        "size: int = 1",
        "if one:",
        "self.size += 1",
        "orelse of: self.size = 0",
        "self.size = 0",
        "match one:",
        "case 1:",
        "return os.sep",
        "case _:",
    ]
    assert {one.function for one in found} == {"Box", "Box.put"}
    texts = {ast.unparse(without(ast.parse(SOURCE), one)) for one in found}
    assert len(texts) == len(found)
    assert all(len(text) < len(ast.unparse(ast.parse(SOURCE))) for text in texts)


@pytest.mark.parametrize("module", MODULES)
def test_every_mutant_compiles(module: str) -> None:
    tree, found = ast.parse(file_of(module).read_text()), deletions_of(module, file_of(module).read_text())
    assert len(found) > 20
    for one in [*found[::20], *(one for one in found if one.text.startswith(("except", "case", "orelse", "finalbody")))]:
        compile(without(tree, one), "mutant", "exec")


def test_what_is_accepted_is_still_there() -> None:
    there = {one.name for name in MODULES for one in deletions_of(name, file_of(name).read_text())}
    assert not accepted().keys() - there
    assert all(len(reason) > 20 for reason in accepted().values())


def test_equal_statements_of_a_function_are_told_apart() -> None:
    source = "def f(one):\n    if one:\n        return\n    if two:\n        return\n    one.pop()\n"
    assert [(one.text, one.nth) for one in deletions_of("ring", source) if one.text == "return"] == [("return", 1), ("return", 2)]


def test_a_kill_is_believed_until_its_test_or_its_module_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deletions, "ROOT", tmp_path)
    module, test, notes = tmp_path / "transfer" / "ring.py", tmp_path / "tests" / "test_ring.py", tmp_path / "notes" / "m.jsonl"
    for path in (module, test):
        path.parent.mkdir()
        path.write_text("as it was\n")
    noticed, hung, survivor = deletions_of("ring", SOURCE)[:3]
    memory = Memory(notes)
    memory.add(Verdict(deletion=noticed, by="tests/test_ring.py::test_it", seconds=1.0))
    memory.add(Verdict(deletion=hung, by="timeout", seconds=1.0))
    memory.add(Verdict(deletion=survivor, by="", seconds=1.0))
    again = Memory(notes)
    assert again.verdict_on(noticed) == Verdict(deletion=noticed, by="tests/test_ring.py::test_it", seconds=0.0)
    assert again.verdict_on(hung) is None and again.verdict_on(survivor) is None
    assert Memory(notes, is_believed=False).verdict_on(noticed) is None
    for path in (module, test):
        path.write_text("otherwise\n")
        assert again.verdict_on(noticed) is None
        assert again.test_for(noticed) == "tests/test_ring.py::test_it"  # it is run first
        path.write_text("as it was\n")
    assert again.verdict_on(noticed) is not None


def test_code_that_does_not_pass_as_it_is_is_no_measure(tmp_path: Path) -> None:
    """Its mutants would all be noticed, by a test that fails anyway."""
    always_red = tmp_path / "test_red.py"
    always_red.write_text("def test_red():\n    assert False\n")
    program = f"from tests.mutation import deletions as d; d.OWN_TESTS['ring'] = [{str(always_red)!r}]; d.main()"
    command = [sys.executable, "-c", program, "--only", "ring", "--lines", "1-60", "--fresh"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "ring.py as it is does not pass" in done.stderr and "test_red" in done.stderr, done.stderr


@pytest.mark.timeout(300)  # two seconds on a quiet machine
def test_a_deletion_is_noticed_by_a_test_that_is_named() -> None:
    """Two statements of the real ring: each must be noticed, and both in their own processes."""
    (line,) = (one.line for one in deletions_of("ring", file_of("ring").read_text()) if one.text == "self._head = begin + size")
    command = [sys.executable, "-m", "tests.mutation.deletions", "--only", "ring", "--lines", f"{line}-{line + 1}", "--fresh"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 deletions, 2 noticed (0 because they hang), 0 survived" in done.stdout
