"""Deletes each statement of the protocol's core in turn, and asks whether a test notices.

    python -m tests.mutation.deletions [--only ring sender receiver] [--workers 2] [--json FILE] [--lines 100-150] [--fresh]

(`make mutation`; ten minutes on two cores.) A statement is what stands in the body of a function or class, at any
depth: with a compound one goes all that is in it, and its branches and cases go one by one too. Docstrings stay. Each mutant runs
in a process of its own, forked from one that has imported the libraries. First the tests that were written for the module, then,
for those that survive, the rest of tests/protocol. What survives both must be named with a reason in `accepted.toml` beside this
file; what is named there has no second run.

Each run begins with the code as it is: its tests must pass, and their time is the measure of what counts as hanging.

Which test noticed a mutant is remembered in `.kvferry/mutation.jsonl`, so that a run that was interrupted goes on where it was. A
mutant is believed dead while neither its module nor the file of that test has changed, else it runs again, with that test first;
`--fresh` believes nothing. (That a *third* file could bring a mutant back to life is what `--fresh` is for.)

The usual tools do not delete statements: mutmut 3.8 and cosmic-ray 8.7 change operators, numbers, names and arguments.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import hashlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import os
import select
import signal
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
ACCEPTED = Path(__file__).with_name("accepted.toml")
MEMORY = ROOT / ".kvferry" / "mutation.jsonl"
PROFILE = "mutation"
HANGS = " (hangs)"
MIN_LIMIT_S, LIMIT_FACTOR = 30.0, 5.0
"""A mutant hangs, and so is noticed, when its tests take this many times as long as those of the code as it is."""
MODULES = {
    "ring": "transfer.ring",
    "ring_index": "transfer.ring_index",
    "piece": "transfer.piece",
    "sender": "transfer.send.sender",
    "sender_state": "transfer.send.state",
    "sender_events": "transfer.send.events",
    "staging_arena": "transfer.send.staging_arena",
    "receiver": "transfer.receive.receiver",
    "receiver_state": "transfer.receive.state",
    "receiver_events": "transfer.receive.events",
}
_RING = ["tests/protocol/test_ring_rules.py", "tests/protocol/test_rules.py", "tests/unit/test_ring.py"]
_SENDER = [f"tests/protocol/test_{name}.py" for name in ("sender", "sender_direct", "staging", "hostile_decode", "rules")]
_RECEIVER = ["tests/protocol/test_receiver.py", "tests/protocol/test_rules.py"]
OWN_TESTS = {
    "ring": _RING,
    "ring_index": ["tests/unit/test_ring_index.py"],
    "piece": [*_SENDER, *_RECEIVER],
    "sender": _SENDER,
    "sender_state": _SENDER,
    "sender_events": _SENDER,
    "staging_arena": ["tests/protocol/test_staging.py"],
    "receiver": _RECEIVER,
    "receiver_state": _RECEIVER,
    "receiver_events": _RECEIVER,
}
ALL_TESTS = ["tests/unit/test_ring.py", *sorted(f"tests/protocol/{path.name}" for path in ROOT.glob("tests/protocol/test_*.py"))]

_NAMED = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
StepsDown = tuple[tuple[str, int | None], ...]
Name = tuple[str, str, str, int]
"""Module, function, text, nth: what a deletion is called when lines have moved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deletion:
    """One mutant.

    Attributes:
        module: Short name, of `MODULES`.
        function: Qualified name of what it is in.
        line: Of its first line.
        text: What is deleted, its first line.
        nth: 1 for the first of that text in that function, 2 for the next.
        path: How to find it: (field, index) from the module down; index None for all of a field, such as an else branch.
    """

    module: str
    function: str
    line: int
    text: str
    path: StepsDown
    nth: int = 1

    @property
    def name(self) -> Name:
        return self.module, self.function, self.text, self.nth


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
    seen: Counter[Name] = Counter()
    numbered = []
    for one in sorted(found, key=lambda one: one.line):
        seen[one.name] += 1
        numbered.append(replace(one, nth=seen[one.name]))
    return numbered


def _can_go(parent: ast.AST, child: ast.AST, index: int, names: Sequence[str]) -> bool:
    """Only what is in a class or function, and does something.

    No docstring, no method as a whole (nothing could run), and no `return None` at a function's end, which returns it anyway.
    """
    if not names or isinstance(child, ast.Pass | _NAMED):
        return False
    if isinstance(child, ast.Return) and isinstance(parent, ast.FunctionDef) and child is parent.body[-1]:
        return not (child.value is None or (isinstance(child.value, ast.Constant) and child.value.value is None))
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
    if not body and isinstance(gone, ast.ExceptHandler):  # nothing is caught: what was tried is done all the same
        node.body, node.orelse = [*node.body, *node.orelse], []
        node.finalbody = node.finalbody or [ast.copy_location(ast.Pass(), gone)]
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
    """A plugin that tells the first test that failed, and has one of them run before all others."""

    def __init__(self, pipe: int, first: str) -> None:
        self._pipe, self._first = pipe, first

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: item.nodeid != self._first)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            how = HANGS if "Failed: Timeout" in report.longreprtext else ""
            os.write(self._pipe, f"{report.nodeid}{how}".encode()[:900])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            os.write(self._pipe, f"collecting {report.nodeid}".encode()[:900])


def _run_tests(name: str, path: Path, tree: ast.Module, plan: _Plan, first: str, pipe: int) -> int:
    """In the child: the exit code of pytest with the mutant in place."""
    sys.meta_path.insert(0, _Mutated(name, path, tree))
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    # Plain asserts: rewriting them takes longer than most mutants live, and nobody reads their messages.
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--assert=plain"]
    options += [f"--timeout={plan.limit_s / 2}", f"--hypothesis-profile={PROFILE}"]
    return int(pytest.main([*options, *plan.tests], plugins=[_FirstFailure(pipe, first)]))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """Which tests are run, and after how many seconds they hang."""

    tests: Sequence[str]
    limit_s: float


@dataclass(slots=True, kw_only=True)
class _Running:
    deletion: Deletion
    pid: int
    pipe: int
    since_s: float
    limit_s: float


def _start(deletion: Deletion, tree: ast.Module, plan: _Plan, first: str = "") -> _Running:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 3
        with contextlib.suppress(BaseException):
            os.close(reader)
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            code = _run_tests(MODULES[deletion.module], file_of(deletion.module), tree, plan, first, writer)
        os._exit(code)
    os.close(writer)
    return _Running(deletion=deletion, pid=pid, pipe=reader, since_s=time.monotonic(), limit_s=plan.limit_s)


def _finish(one: _Running) -> Verdict:
    """Wait for its end, at most `limit_s` from its start. A survivor is only what ended with all tests passed."""
    text = b""
    is_late = False
    while True:
        left_s = one.since_s + one.limit_s - time.monotonic()
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
    by = text.decode(errors="replace") or ("timeout" if is_late else "" if code == 0 else f"exit code {code}")
    return Verdict(deletion=one.deletion, by=by, seconds=time.monotonic() - one.since_s)


def _plan_for(module: str, tests: Sequence[str]) -> _Plan:
    """Run the tests with the module as it is: they must pass, and tell how long that takes.

    Raises:
        SystemExit: One of them fails, so nothing can be learnt from a mutant's failing.
    """
    as_it_is = Deletion(module=module, function="", line=0, text="", path=())
    verdict = _finish(_start(as_it_is, ast.parse(file_of(module).read_text()), _Plan(tests=tests, limit_s=1800.0)))
    if verdict.by:
        raise SystemExit(f"{module}.py as it is does not pass: {verdict.by}")
    return _Plan(tests=tests, limit_s=max(MIN_LIMIT_S, LIMIT_FACTOR * verdict.seconds))


def judge(
    deletions: Sequence[Deletion], tests: Mapping[str, Sequence[str]], memory: Memory, *, workers: int
) -> Iterator[Verdict]:
    """Run the tests of each mutant that is not known to be noticed; verdicts in the mutants' order."""
    trees = {module: ast.parse(file_of(module).read_text()) for module in {one.module for one in deletions}}
    plans: dict[str, _Plan] = {}
    waiting, running = list(reversed(deletions)), list[Verdict | _Running]()
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                deletion = waiting.pop()
                known = memory.verdict_on(deletion)
                if known is not None:
                    running.append(known)
                    continue
                if deletion.module not in plans:
                    plans[deletion.module] = _plan_for(deletion.module, tests[deletion.module])
                mutant = without(trees[deletion.module], deletion)
                running.append(_start(deletion, mutant, plans[deletion.module], memory.test_for(deletion)))
            one = running[0]
            if isinstance(one, _Running):
                one = _finish(one)
                memory.add(one)
            del running[0]
            yield one
    finally:  # a mutant that hangs must not outlive an interrupted run
        for one in running:
            if isinstance(one, _Running):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(one.pid, signal.SIGKILL)


class Memory:
    """Which test noticed which mutant, on disk.

    Args:
        path: A file of JSON lines, the last one of a mutant holds.
        is_believed: Whether a mutant need not run again while its module and that test's file are what they were.
    """

    def __init__(self, path: Path, *, is_believed: bool = True) -> None:
        self._path, self._is_believed = path, is_believed
        self._by: dict[Name, tuple[str, str]] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                one = json.loads(line)
                module, function, text, nth = one["name"]
                self._by[module, function, text, nth] = one["by"], one["digest"]

    def verdict_on(self, deletion: Deletion) -> Verdict | None:
        """What is known and still true; None: it has to run."""
        by, digest = self._by.get(deletion.name, ("", ""))
        if not self._is_believed or not digest or digest != self._digest(deletion, by):
            return None
        return Verdict(deletion=deletion, by=by, seconds=0.0)

    def test_for(self, deletion: Deletion) -> str:
        """The test that noticed it, some time ago; empty when none did."""
        return self._by.get(deletion.name, ("", ""))[0].removesuffix(HANGS)

    def add(self, verdict: Verdict) -> None:
        """Remember who noticed the mutant, if somebody did."""
        if verdict.by:
            digest = self._digest(verdict.deletion, verdict.by)
            self._by[verdict.deletion.name] = verdict.by, digest
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(json.dumps({"name": verdict.deletion.name, "by": verdict.by, "digest": digest}) + "\n")

    def _digest(self, deletion: Deletion, by: str) -> str:
        """Of the module and the test's file; empty when it is no test of a file that noticed: a hang must be seen again."""
        test = ROOT / by.partition("::")[0]
        if not by.startswith("tests/") or not test.is_file():
            return ""
        return hashlib.sha256(file_of(deletion.module).read_bytes() + test.read_bytes()).hexdigest()


def file_of(module: str) -> Path:
    return ROOT / (MODULES[module].replace(".", "/") + ".py")


def where(deletion: Deletion) -> str:
    return f"{deletion.module}.py:{deletion.line} {deletion.function}: {deletion.text}"


def accepted() -> dict[Name, str]:
    """Reasons of survivors that may be."""
    content = tomllib.loads(ACCEPTED.read_text())
    return {
        (one["module"], one["function"], one["text"], one.get("nth", 1)): one["reason"] for one in content.get("survivor", [])
    }


def _preload() -> None:
    """Import the libraries that every mutant needs, and nothing of ours, for `import transfer` imports the ring."""
    os.environ["CI"] = "1"  # the same examples for every mutant
    for name in ("hypothesis", "msgpack", "pydantic", "structlog", "xxhash"):
        importlib.import_module(name)
    for plugin in importlib.metadata.entry_points(group="pytest11"):
        plugin.load()
    loaded = [name for name in MODULES.values() if name in sys.modules]
    if loaded:
        raise SystemExit(f"{', '.join(loaded)} would be in every mutant as it is")
    from hypothesis import HealthCheck, Phase, settings

    # As in CI, but a failure is enough: nobody reads its smallest example.
    phases = (Phase.explicit, Phase.generate)
    settings.register_profile(
        PROFILE, deadline=None, derandomize=True, phases=phases, suppress_health_check=[HealthCheck.too_slow]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="deletes each statement of the protocol's core: does a test notice?")
    parser.add_argument("--only", nargs="+", choices=list(MODULES), default=list(MODULES), metavar="MODULE")
    parser.add_argument("--lines", help="FIRST-LAST: only statements that begin there")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--fresh", action="store_true", help="run every mutant, also those that are known to be noticed")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    _preload()
    deletions = [one for module in arguments.only for one in deletions_of(module, file_of(module).read_text())]
    if arguments.lines:
        first, last = map(int, arguments.lines.split("-"))
        deletions = [one for one in deletions if first <= one.line <= last]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    started_s = time.monotonic()
    memory, reasons = Memory(MEMORY, is_believed=not arguments.fresh), accepted()
    verdicts: list[Verdict] = []
    for verdict in judge(deletions, OWN_TESTS, memory, workers=arguments.workers):
        verdicts.append(verdict)
        if not verdict.by and verdict.deletion.name not in reasons:
            print(f"          {where(verdict.deletion)}", flush=True)
        if len(verdicts) % 25 == 0:
            survived = sum(not one.by for one in verdicts)
            print(f"{time.monotonic() - started_s:6.0f} s  {len(verdicts)} of {len(deletions)}, {survived} left", flush=True)
    again = [one.deletion for one in verdicts if not one.by and one.deletion.name not in reasons]
    left = sum(not one.by for one in verdicts)
    print(f"{left} of {len(deletions)} survived their module's own tests, {len(again)} of them without a reason", flush=True)
    others = {module: [test for test in ALL_TESTS if test not in own] for module, own in OWN_TESTS.items()}
    second: dict[Deletion, Verdict] = {}
    for one in judge(again, others, memory, workers=arguments.workers):
        second[one.deletion] = one
        print(f"{one.seconds:8.0f} s  {where(one.deletion)}: {one.by or 'not noticed'}", flush=True)
    verdicts = [second.get(one.deletion, one) for one in verdicts]
    survivors = [one.deletion for one in verdicts if not one.by]
    for deletion in survivors:
        reason = reasons.get(deletion.name, "NOT EXPLAINED")
        print(f"{where(deletion)}\n    {reason}")
    for one in verdicts:
        if one.by and one.deletion.name in reasons:
            print(f"accepted, but noticed by {one.by}: {where(one.deletion)}")
    unexplained = sum(deletion.name not in reasons for deletion in survivors)
    hung = sum(one.by == "timeout" or one.by.endswith(HANGS) for one in verdicts)
    print(
        f"{len(deletions)} deletions, {len(deletions) - len(survivors)} noticed ({hung} because they hang), "
        f"{len(survivors)} survived, {unexplained} of them without a reason; {time.monotonic() - started_s:.0f} s"
    )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"verdicts": [asdict(one) for one in verdicts]}, indent=1) + "\n")
    return int(unexplained > 0)


if __name__ == "__main__":
    sys.exit(main())
