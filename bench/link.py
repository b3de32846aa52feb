"""One link, from 4 KiB to 1 GiB, between two processes: every transport of kvferry, and what others offer, in the same run.

    python -m bench.link [--json FILE] [--quick] [--device cpu|cuda] [--max-mb N] [--lanes NAME ...] [--passes N] [--spin-us N]

A row's time is that of one write, from its call until its source may be reused; with 8 in flight it is that of all eight, divided
by eight. On kvferry's two-sided lanes the answer's rows tell the time until a byte of the target's came back. The yardstick is a
copy of the same bytes: memcpy on one thread, or the copy engine's into another process's mapped GPU memory. What goes over a
library (NIXL, UCX) is held against that library's plain use.

``--device cuda`` takes two GPUs, or one for both ends where there is one, and says so. What cannot be measured is named below the
table with its reason.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from bench import fused_gather, link_ends
from bench.link_ends import LinkSamples
from bench.link_plan import Samples, Step, steps
from bench.pair import Devices, PairFailed, run_pair
from bench.peers import cuda_copy, nixl, ucx
from bench.timing import Environment, Report, Row, argument_parser, sample
from transfer.pool.staging import zeroed_bytes

MEMCPY = "memcpy, one thread"
PEER_MEMCPY = "peer memcpy over CUDA IPC"
NIXL_BULK = "NIXL bulk WRITE, plain"
UCX_PLAIN = "UCXX tag send, plain"
FUSED = "kvferry, gather into the peer's ring"
FUSED_WITH_DIGEST = "kvferry, gather into the peer's ring, with digest"
ANSWERED = ", with answer"
PIECES = ((40_960, 8192), (65_536, 512))  # a block of 16 tokens, one token: two heads of one layer's K or V in Llama 3 70B
_QUICK_PIECES = ((2_048, 8192), (4_096, 512))
_TIMEOUT_S = 100.0


@dataclass(slots=True, kw_only=True)
class Measured:
    """Samples by what was measured and by step; several passes add to them."""

    samples_s: dict[str, dict[str, Samples]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    facts: dict[str, object] = field(default_factory=dict)

    def add(self, what: str, samples_s: dict[str, Samples]) -> None:
        for step, found in samples_s.items():
            self.samples_s.setdefault(what, {}).setdefault(step, []).extend(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What is to be measured.

    Args:
        lanes: Of `measures`; empty: all.
    """

    devices: Devices
    plan: Sequence[Step]
    is_quick: bool
    spin_s: float
    lanes: Sequence[str] = ()
    environment: Environment = field(default_factory=Environment.here)

    @property
    def one_by_one(self) -> list[Step]:
        return [step for step in self.plan if step.in_flight == 1]

    @property
    def pieces(self) -> Sequence[tuple[int, int]]:
        return _QUICK_PIECES if self.is_quick else PIECES

    def pair(self, module: object, *arguments: object) -> object:
        ends: tuple[Callable[..., object], Callable[..., object]] = (module.write, module.serve)  # type: ignore[attr-defined]
        return run_pair(*ends, *arguments, devices=self.devices, timeout_s=_TIMEOUT_S)


def measures(run: Run) -> dict[str, Callable[[Measured], None]]:
    """By name, in order; the yardstick first."""
    found: dict[str, Callable[[Measured], None]] = {}
    if run.devices.is_cuda:
        found["copy"] = partial(_peer, run, PEER_MEMCPY, cuda_copy)
        lanes = ["cuda_ipc/copy", "nixl", "ucx"]
    else:
        found["copy"] = partial(_memcpy, run)
        lanes = ["ucx/shm", "ucx/net", "nixl"]
    found["ucx plain"] = partial(_peer, run, UCX_PLAIN, ucx)
    found["nixl plain"] = partial(_nixl, run)
    for lane in lanes:
        found[lane] = partial(_ours, run, lane)
    if run.devices.is_cuda:
        found["fused"] = partial(_fused, run)
    return {name: measure for name, measure in found.items() if not run.lanes or name in run.lanes}


def _memcpy(run: Run, into: Measured) -> None:
    most = max(step.num_bytes for step in run.plan)
    source, target = zeroed_bytes(most).fill_(1).numpy(), zeroed_bytes(most).numpy()
    for step in run.one_by_one:
        copy = partial(np.copyto, target[: step.num_bytes], source[: step.num_bytes])
        into.add(MEMCPY, {step.name: sample(copy, repetitions=step.repetitions)})


def _peer(run: Run, what: str, module: object, into: Measured) -> None:
    found = run.pair(module, run.one_by_one)
    assert isinstance(found, dict)
    into.add(what, found)


def _nixl(run: Run, into: Measured) -> None:
    found = run.pair(nixl, run.one_by_one, run.pieces)
    assert isinstance(found, dict)
    for count, num_bytes in run.pieces:
        name = nixl.pieces_name(count, num_bytes)
        into.add(f"NIXL, {name}", {name: found.pop(name)})
    into.add(NIXL_BULK, found)


def _ours(run: Run, lane: str, into: Measured) -> None:
    found = run.pair(link_ends, run.plan, lane, run.spin_s)
    assert isinstance(found, LinkSamples)
    into.add(f"kvferry {lane}", found.writes)
    into.add(f"kvferry {lane}{ANSWERED}", found.answers)
    into.facts[f"kvferry {lane}"] = found.lane


def _fused(run: Run, into: Measured) -> None:
    found = run.pair(fused_gather, fused_gather.cases(is_quick=run.is_quick))
    assert isinstance(found, dict)
    for what, samples_s in zip((PEER_MEMCPY, FUSED, FUSED_WITH_DIGEST), (found[key] for key in fused_gather.KEYS), strict=True):
        into.add(what, samples_s)


def measure(run: Run, *, num_passes: int, json_path: Path | None = None) -> tuple[Report, bool]:
    """The report, and whether something failed that should have run.

    Args:
        json_path: Gets what there is of the report after each lane.
    """
    measured = Measured()
    is_failed = False
    for _ in range(num_passes):
        for name, one in measures(run).items():
            try:
                one(measured)
            except PairFailed as error:
                measured.missing[name] = str(error)
                is_failed |= not error.lacks_library
            if json_path is not None:
                _report(run, measured).write_json(json_path)
    return _report(run, measured), is_failed


def _report(run: Run, measured: Measured) -> Report:
    report = Report(title=f"One link, {run.devices}: a write until its source may be reused", environment=run.environment)
    sizes = {step.name: step.num_bytes for step in run.plan}
    sizes |= {nixl.pieces_name(count, size): count * size for count, size in run.pieces}
    sizes |= {case.name: case.num_bytes for case in fused_gather.cases(is_quick=run.is_quick)}
    _add_rows(report, measured, sizes)
    report.facts["devices"] = {"where": str(run.devices)}
    if measured.facts:
        report.facts["carried by"] = measured.facts
    if measured.missing:
        report.facts["not measured"] = dict(measured.missing)
    return report


def _add_rows(report: Report, measured: Measured, sizes: dict[str, int]) -> None:
    """A row for everything measured, each with a ratio to what it is held against, where that was measured."""
    made: dict[tuple[str, str], Row] = {}
    for step in sizes:
        for what in [what for what, by_step in measured.samples_s.items() if step in by_step]:
            against = next((made[found] for found in _yardsticks(what, step) if found in made), None)
            made[what, step] = report.add(step, what, measured.samples_s[what][step], num_bytes=sizes[step], against=against)


def _yardsticks(what: str, step: str) -> list[tuple[str, str]]:
    """What a row is held against, best first: the same library's plain use, then a copy; several in flight against one."""
    one = step.partition(",")[0] if what.startswith("kvferry") and "in flight" in step else step
    libraries = {"kvferry nixl": NIXL_BULK, "kvferry ucx": UCX_PLAIN}
    own = [plain for prefix, plain in libraries.items() if what.startswith(prefix) and not what.endswith(ANSWERED)]
    return [(name, one) for name in (*own, PEER_MEMCPY, MEMCPY) if name != what]


def main() -> int:
    parser = argument_parser(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--one-gpu", action="store_true", help="both ends on one GPU, also where there are two")
    parser.add_argument("--max-mb", type=int, default=1024, help="largest write, in MiB")
    parser.add_argument("--lanes", nargs="+", default=[], metavar="NAME", help="some of them; the table's text names all")
    parser.add_argument("--passes", type=int, default=1, help="over all lanes: more, where other work disturbs them in turn")
    parser.add_argument("--spin-us", type=float, default=0.0, help="SessionDriver's spin_s, in microseconds")
    arguments = parser.parse_args()
    try:
        devices = Devices.of(arguments.device, is_one_gpu=arguments.one_gpu)
    except PairFailed as error:
        parser.error(str(error))
    plan = steps(device_type=arguments.device, max_bytes=arguments.max_mb << 20, is_quick=arguments.quick)
    run = Run(devices=devices, plan=plan, is_quick=arguments.quick, spin_s=arguments.spin_us * 1e-6, lanes=arguments.lanes)
    unknown = set(arguments.lanes) - measures(Run(devices=devices, plan=plan, is_quick=True, spin_s=0.0)).keys()
    if unknown:
        parser.error(f"no lane {', '.join(sorted(unknown))}; there are {', '.join(measures(run) or [])}")
    report, is_failed = measure(run, num_passes=arguments.passes, json_path=arguments.json)
    report.finish(arguments.json)
    return int(is_failed)


if __name__ == "__main__":
    sys.exit(main())
