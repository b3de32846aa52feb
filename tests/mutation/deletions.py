"""Deletes each statement of the protocol's core in turn, and asks whether a test notices.

    python -m tests.mutation.deletions [--only ring sender receiver] [--workers 2] [--json FILE] [--lines 100-150]

(`make mutation`; on two quiet cores about half an hour.) A statement is what stands in the body of a function or class, at any
depth: with a compound one goes all that is in it, and its branches and cases go one by one too. Docstrings stay. Each mutant runs
in a process of its own, forked from one that has imported the libraries. First the tests that were written for the module, then,
for those that survive, all of tests/protocol. What survives both must be named with a reason in `accepted.toml` beside this file.

The usual tools do not delete statements: mutmut 3.8 and cosmic-ray 8.7 change operators, numbers, names and arguments.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import select
import signal
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
ACCEPTED = Path(__file__).with_name("accepted.toml")
TIMEOUT_S = 120.0
"""A mutant that hangs is noticed: the suite has a bound for each test as well."""
MODULES = {
    "ring": "transfer.ring",
    "sender": "prefill_node.sender",
    "receiver": "decode_node.receiver",
}
OWN_TESTS = {
    "ring": ["tests/unit/test_ring.py", "tests/protocol/test_ring_rules.py", "tests/protocol/test_rules.py"],
    "sender": ["tests/protocol/test_sender.py", "tests/protocol/test_sender_direct.py", "tests/protocol/test_rules.py"],
    "receiver": ["tests/protocol/test_receiver.py", "tests/protocol/test_rules.py"],
}
ALL_TESTS = ["tests/unit/test_ring.py", "tests/protocol"]

_NAMED = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
StepsDown = tuple[tuple[str, int | None], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deletion:
    """One mutant.

    Attributes:
        module: Short name, of `MODULES`.
        function: Qualified name of what it is in.
        line: Of its first line.
        text: What is deleted, its first line.
        path: How to find it: (field, index) from the module down; index None for all of a field, such as an else branch.
    """

    module: str
    function: str
    line: int
    text: str
    path: StepsDown


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of a mutant; `by` is the first test that failed, or "timeout", or empty for a survivor."""

    deletion: Deletion
    by: str
    seconds: float


def deletions_of(module: str, source: str) -> list[Deletion]:
    """Every mutant of a module's source, in the order of the lines."""
    found: list[Deletion] = []
    lines = source.splitlines()

    def visit(node: ast.AST, names: tuple[str, ...], path: StepsDown) -> None:
        for name, value in ast.iter_fields(node):
            if (
                not isinstance(value, list)
                or not value
                or not isinstance(value[0], ast.stmt | ast.match_case | ast.ExceptHandler)
            ):
                continue
            if name in ("orelse", "finalbody") and names:
                first: ast.AST = value[0]
                found.append(_deletion(module, names, lines, first, (*path, (name, None)), f"{name} of: "))
            for index, child in enumerate(value):
                inner = (
                    (*names, child.name) if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) else names
                )
                at = (*path, (name, index))
                if _can_go(node, child, index, names):
                    found.append(_deletion(module, names, lines, child, at))
                visit(child, inner, at)

    visit(ast.parse(source), (), ())
    return sorted(found, key=lambda one: one.line)


def _can_go(parent: ast.AST, child: ast.AST, index: int, names: Sequence[str]) -> bool:
    """Only what is in a class or function, and does something: no docstring, and no method as a whole (nothing could run)."""
    if not names or isinstance(child, ast.Pass | _NAMED):
        return False
    if isinstance(child, ast.match_case):
        assert isinstance(parent, ast.Match)
        return len(parent.cases) > 1
    return not (isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant))


def _deletion(
    module: str,
    names: Sequence[str],
    lines: Sequence[str],
    node: ast.AST,
    path: StepsDown,
    prefix: str = "",
) -> Deletion:
    line = node.pattern.lineno if isinstance(node, ast.match_case) else getattr(node, "lineno", 0)
    return Deletion(module=module, function=".".join(names), line=line, text=prefix + lines[line - 1].strip(), path=path)


def without(tree: ast.Module, deletion: Deletion) -> ast.Module:
    """A copy of the module without the statement."""
    tree = copy.deepcopy(tree)
    node: Any = tree
    for name, index in deletion.path[:-1]:
        node = getattr(node, name)[index]
    name, index = deletion.path[-1]
    if index is None:
        setattr(node, name, [])
        return ast.fix_missing_locations(tree)
    body = getattr(node, name)
    gone = body.pop(index)
    if not body and not isinstance(gone, ast.match_case | ast.ExceptHandler):
        body.append(ast.copy_location(ast.Pass(), gone))
    return ast.fix_missing_locations(tree)


class _Mutated(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Loads the mutant in place of the module's file."""

    def __init__(self, name: str, path: Path, tree: ast.Module) -> None:
        self._name, self._path, self._tree = name, path, tree

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.util.spec_from_file_location(fullname, self._path, loader=self) if fullname == self._name else None

    def get_source(self, fullname: str) -> str:
        return self._path.read_text()

    def get_code(self, fullname: str) -> Any:
        return compile(self._tree, str(self._path), "exec")

    def exec_module(self, module: ModuleType) -> None:
        exec(self.get_code(module.__name__), module.__dict__)


class _FirstFailure:
    """A plugin that tells the first test that failed."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            os.write(self._pipe, report.nodeid.encode()[:900])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            os.write(self._pipe, f"collecting {report.nodeid}".encode()[:900])


def _run_tests(name: str, path: Path, tree: ast.Module, tests: Sequence[str], pipe: int) -> int:
    """In the child: the exit code of pytest with the mutant in place."""
    sys.meta_path.insert(0, _Mutated(name, path, tree))
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    arguments = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--timeout=30", *tests]
    return int(pytest.main(arguments, plugins=[_FirstFailure(pipe)]))


@dataclass(slots=True, kw_only=True)
class _Running:
    deletion: Deletion
    pid: int
    pipe: int
    since_s: float


def _start(deletion: Deletion, tree: ast.Module, tests: Sequence[str]) -> _Running:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 3
        with contextlib.suppress(BaseException):
            os.close(reader)
            os.setsid()
            name = MODULES[deletion.module]
            code = _run_tests(name, file_of(deletion.module), without(tree, deletion), tests, writer)
        os._exit(code)
    os.close(writer)
    return _Running(deletion=deletion, pid=pid, pipe=reader, since_s=time.monotonic())


def _finish(one: _Running) -> Verdict:
    """Wait for its end, at most `TIMEOUT_S` from its start. A survivor is only what ended with all tests passed."""
    text = b""
    is_late = False
    while True:
        left_s = one.since_s + TIMEOUT_S - time.monotonic()
        ready, _, _ = select.select([one.pipe], [], [], max(0.0, left_s))
        if not ready:
            is_late = True
            os.killpg(one.pid, signal.SIGKILL)
            break
        part = os.read(one.pipe, 1024)
        if not part:
            break
        text = text or part
    os.close(one.pipe)
    _, status = os.waitpid(one.pid, 0)
    code = os.waitstatus_to_exitcode(status)
    by = "timeout" if is_late else "" if code == 0 else text.decode(errors="replace") or f"exit code {code}"
    return Verdict(deletion=one.deletion, by=by, seconds=time.monotonic() - one.since_s)


def judge(deletions: Sequence[Deletion], tests: dict[str, list[str]], *, workers: int) -> Iterator[Verdict]:
    """Run the tests of each mutant; verdicts in the mutants' order."""
    trees = {module: ast.parse(file_of(module).read_text()) for module in {one.module for one in deletions}}
    waiting, running = list(reversed(deletions)), []
    while waiting or running:
        while waiting and len(running) < workers:
            deletion = waiting.pop()
            running.append(_start(deletion, trees[deletion.module], tests[deletion.module]))
        yield _finish(running.pop(0))


def file_of(module: str) -> Path:
    return ROOT / (MODULES[module].replace(".", "/") + ".py")


def accepted() -> dict[tuple[str, str, str], str]:
    """Reasons of survivors that may be, by (module, function, text)."""
    content = tomllib.loads(ACCEPTED.read_text())
    return {(one["module"], one["function"], one["text"]): one["reason"] for one in content.get("survivor", [])}


def _preload() -> None:
    """Import the libraries that every mutant needs, and nothing of ours, for `import transfer` imports the ring."""
    os.environ["CI"] = "1"  # the same examples for every mutant
    for name in ("hypothesis", "msgpack", "pydantic", "structlog", "xxhash"):
        importlib.import_module(name)
    loaded = [name for name in MODULES.values() if name in sys.modules]
    if loaded:
        raise SystemExit(f"{', '.join(loaded)} would be in every mutant as it is")


def main() -> int:
    parser = argparse.ArgumentParser(description="deletes each statement of the protocol's core: does a test notice?")
    parser.add_argument("--only", nargs="+", choices=list(MODULES), default=list(MODULES), metavar="MODULE")
    parser.add_argument("--lines", help="FIRST-LAST: only statements that begin there")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    _preload()
    deletions = [one for module in arguments.only for one in deletions_of(module, file_of(module).read_text())]
    if arguments.lines:
        first, last = map(int, arguments.lines.split("-"))
        deletions = [one for one in deletions if first <= one.line <= last]
    started_s = time.monotonic()
    verdicts: list[Verdict] = []
    for verdict in judge(deletions, OWN_TESTS, workers=arguments.workers):
        verdicts.append(verdict)
        if len(verdicts) % 25 == 0:
            survived = sum(not one.by for one in verdicts)
            print(f"{time.monotonic() - started_s:6.0f} s  {len(verdicts)} of {len(deletions)}, {survived} left", flush=True)
    again = [one.deletion for one in verdicts if not one.by]
    print(f"{len(again)} of {len(deletions)} survived their module's own tests; they run with all of tests/protocol", flush=True)
    second = {one.deletion: one for one in judge(again, dict.fromkeys(MODULES, ALL_TESTS), workers=arguments.workers)}
    verdicts = [second.get(one.deletion, one) for one in verdicts]
    reasons = accepted()
    survivors = [one for one in verdicts if not one.by]
    unexplained = 0
    for one in survivors:
        deletion = one.deletion
        reason = reasons.get((deletion.module, deletion.function, deletion.text))
        unexplained += reason is None
        print(f"{deletion.module}.py:{deletion.line} {deletion.function}: {deletion.text}\n    {reason or 'NOT EXPLAINED'}")
    print(
        f"{len(deletions)} deletions, {len(deletions) - len(survivors)} noticed, {len(survivors)} survived, "
        f"{unexplained} of them without a reason; {time.monotonic() - started_s:.0f} s"
    )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"verdicts": [asdict(one) for one in verdicts]}, indent=1) + "\n")
    return int(unexplained > 0)


if __name__ == "__main__":
    sys.exit(main())
