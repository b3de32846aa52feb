"""KV from one process's paged pool into another's: everything that ranks do for it, but no engine.

    python -m bench.pool_to_pool [--json FILE] [--quick] [--device cpu|cuda] [--lanes ucx ...] [--mb 64 ...] [--in-flight 1 4 ...]
                                 [--peers] [--sglang-wheel FILE] [--prefill-tp 4 --decode-tp 2] ...

Two processes, each with the real loop of its role: attach with link probe over gRPC, grants over ZeroMQ, gather, write into the
ring, digest, scatter, watermark back. Pages lie in random order and are of different size on the two sides. A request's time runs
from the moment at which all its KV lies computed in the prefill pool until the decode rank calls it whole. As in a real prefill
its grants were asked for before that, and on GPUs its gathers queued behind the step's event, see `bench.engine_step`
(``--asks-late``: only then). After every round the bytes are compared (see `bench.pool_setting`), outside of what is timed.

The yardstick is one copy of the same bytes: on CPUs memcpy on one thread, measured before every round in a process as the system
starts it (`bench.plain_memcpy`); on GPUs the copy engine's into the other process's memory. A transfer over memory of two CPU
processes takes at least two copies on the same cores, over `shm`: gather and scatter, each with the digest in the same pass.
Over the other transports it takes three.
``--peers`` adds what others do with the same bytes: a NIXL write, a NIXL descriptor for each page and layer, on GPUs the sequence
of SGLang's staging.
"""

from __future__ import annotations

import statistics
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from bench.link_ends import LANES
from bench.link_plan import Samples, Step
from bench.pair import Devices, End, PairFailed, run_pair
from bench.peers import cuda_copy, nixl, sglang_sequence
from bench.pool_rounds import Played, Rounds, play
from bench.pool_setting import MODELS, Case, Setting
from bench.timing import Report, Row, argument_parser
from transfer.config import StagingConfig
from transfer.errors import ConfigError

TARGET_RATIO = 0.35
TARGET_RATIO_SHM = 0.6
TARGET_RATIO_SHM_ALONE = 0.45
TARGET_CPU_SHM_S = 0.018  # of both ends, for 64 MiB
MEMCPY = "memcpy, one thread"
RANK_MEMCPY = "memcpy in its decode process"
PEER_MEMCPY = "peer memcpy over CUDA IPC"
NIXL_BULK = "NIXL bulk WRITE"
SGLANG = "SGLang's gather, NIXL WRITE, SGLang's scatter"
POOL_TO_POOL = "pool to pool"
REQUEST = "a request, computed to whole"
_MOST_POOL_BYTES = {"cpu": 4 << 30, "cuda": 40 << 30}
_MOST_PIECES_BYTES = 1 << 30
_TIMEOUT_S = 150.0


def lane_row(lane: str, what: str) -> str:
    return f"kvferry {lane}, {what}"


def memcpy_row(lane: str) -> str:
    """Each lane has its own, taken in turn with its rounds: other work on the machine slows both alike."""
    return f"{MEMCPY}, in turn with {lane}"


class Measured:
    """The report that grows, and what of it others are held against."""

    def __init__(self, setting: Setting) -> None:
        cut = (
            f"{setting.model}, TP {setting.prefill_tp} -> {setting.decode_tp}, pages {setting.prefill_page_size} -> "
            f"{setting.decode_page_size} {setting.decode_order}"
        )
        self.setting = setting
        self.report = Report(title=f"Pool to pool, {setting.devices}: {cut}")
        self.report.facts["setting"] = asdict(setting)
        self.missing: dict[str, str] = {}
        self._limits: dict[str, Row] = {}

    def add_limit(self, case: Case, what: str, samples_s: Sequence[float]) -> None:
        """What the case's next rows are held against."""
        self._limits.pop(self.setting.name_of(case), None)
        self._limits[self.setting.name_of(case)] = self.add(case, what, samples_s)

    def add(self, case: Case, what: str, samples_s: Sequence[float]) -> Row:
        """A row of a request's bytes."""
        name = self.setting.name_of(case)
        moved = self.setting.moved_bytes(case.num_tokens)
        return self.report.add(name, what, samples_s, num_bytes=moved, against=self._limits.get(name))

    def add_played(self, lane: str, played: Played) -> None:
        for rounds in played.rounds:
            if rounds.memcpy_s:
                self.add_limit(rounds.case, memcpy_row(lane), rounds.memcpy_s)
                self.add(rounds.case, lane_row(lane, RANK_MEMCPY), rounds.rank_memcpy_s)
            self._add_rounds(lane, played, rounds)

    def _add_rounds(self, lane: str, played: Played, rounds: Rounds) -> None:
        case, name = rounds.case, self.setting.name_of(rounds.case)
        self.add(case, lane_row(lane, POOL_TO_POOL), [wall_s / case.in_flight for wall_s in rounds.wall_s])
        self.add(case, lane_row(lane, REQUEST), rounds.request_s)
        for stage in [stage for stage in ("credit_wait", "gather", "write", "scatter", "ack") if stage in rounds.stages_s]:
            self.report.add(name, lane_row(lane, f"{stage} of a chunk"), rounds.stages_s[stage])
        for hop, samples_s in rounds.hops_s.items():
            self.report.add(name, lane_row(lane, hop), samples_s)
        for process, cpu_s in (("prefill", rounds.prefill_cpu_s), ("decode", rounds.decode_cpu_s)):
            per_request_s = [seconds / case.in_flight for seconds in cpu_s]
            self.report.add(name, lane_row(lane, f"CPU of {process}, a request"), per_request_s)
        chunks = len(rounds.wall_s) * case.in_flight * rounds.num_chunks
        self.report.facts[f"{name}, {lane}"] = {
            "writes_per_chunk_and_route": rounds.writes / chunks,
            "chunks_per_request": rounds.num_chunks,
            "layers_per_chunk": rounds.plan.layers_per_group or self.setting.layout.num_layers,
            "overlap": statistics.median(rounds.overlap),
            "acks_per_chunk": rounds.acks / chunks,
            "resends": rounds.resends,
            "ring_peak_bytes": played.ring_peak_bytes,
            "lane": played.link.lane,
            "probe_gb_per_s": played.link.bandwidth_bytes_per_s / 1e9,
            "probe_latency_us": played.link.latency_s * 1e6,
        }


def measure(
    setting: Setting,
    lanes: Sequence[str],
    *,
    num_rounds: int,
    has_peers: bool = False,
    wheel: Path | None = None,
    json_path: Path | None = None,
) -> tuple[Report, bool]:
    """The report, and whether a lane failed.

    Args:
        json_path: Gets what there is of the report after each lane.
    """
    measured = Measured(setting)
    if setting.devices.is_cuda:
        _measure_limit(measured, num_rounds)
    is_failed = False
    for lane in lanes:
        try:
            measured.add_played(lane, play(setting, lane, num_rounds=num_rounds, timeout_s=_TIMEOUT_S))
        except PairFailed as error:
            measured.missing[lane] = str(error)
            is_failed |= not error.lacks_library
        if json_path is not None:
            measured.report.write_json(json_path)
    if has_peers:
        _measure_peers(measured, num_rounds, wheel)
    if measured.missing:
        measured.report.facts["not measured"] = dict(measured.missing)
    return measured.report, is_failed


def _measure_limit(measured: Measured, num_rounds: int) -> None:
    """The copy engine's copy of the same bytes."""
    steps = _steps(measured.setting, num_rounds)
    copies = _pair(measured, PEER_MEMCPY, cuda_copy, list(steps.values()))
    for case in measured.setting.cases:
        if samples_s := copies.get(steps[case.num_tokens].name):
            measured.add_limit(case, PEER_MEMCPY, samples_s)


def _measure_peers(measured: Measured, num_rounds: int, wheel: Path | None) -> None:
    """What others do with the same bytes, one request at a time."""
    setting, steps = measured.setting, _steps(measured.setting, num_rounds)
    cases = {case.num_tokens: case for case in reversed(setting.cases)}  # the first of each size
    page_bytes = setting.moved_bytes(setting.prefill_page_size) // (2 * setting.layout.num_layers)
    pieces = {tokens: step.num_bytes // page_bytes for tokens, step in steps.items() if not tokens % setting.prefill_page_size}
    wanted = [(count, page_bytes) for count in pieces.values() if count * page_bytes <= _MOST_PIECES_BYTES]
    found = _pair(measured, NIXL_BULK, nixl, list(steps.values()), wanted)
    for tokens, case in cases.items():
        names = {NIXL_BULK: steps[tokens].name}
        if tokens in pieces:
            name = nixl.pieces_name(pieces[tokens], page_bytes)
            names[f"NIXL, {name}"] = name
        for what, name in names.items():
            if samples_s := found.get(name):
                measured.add(case, what, samples_s)
    if setting.devices.is_cuda:
        page = max(setting.prefill_page_size, setting.decode_page_size)
        whole = [case for case in cases.values() if not case.num_tokens % page]
        taken = _pair(measured, SGLANG, sglang_sequence, setting, whole, max(3, num_rounds), wheel) if whole else {}
        for case in whole:
            if samples_s := taken.get(setting.name_of(case)):
                measured.add(case, SGLANG, samples_s)


def _steps(setting: Setting, num_rounds: int) -> dict[int, Step]:
    """A write of each size there is, by tokens."""
    sizes = {case.num_tokens: setting.moved_bytes(case.num_tokens) for case in setting.cases}
    return {tokens: Step(num_bytes=num_bytes, repetitions=max(3, num_rounds)) for tokens, num_bytes in sizes.items()}


def _pair(measured: Measured, name: str, module: object, *arguments: object) -> dict[str, Samples]:
    """What the module's two ends found; nothing, and why, where they failed."""
    ends: tuple[End, End] = (module.write, module.serve)  # type: ignore[attr-defined]
    try:
        found: dict[str, Samples] = run_pair(*ends, *arguments, devices=measured.setting.devices, timeout_s=_TIMEOUT_S)
    except PairFailed as error:
        measured.missing[name] = str(error)
        return {}
    return found


def setting_of(arguments: Namespace) -> Setting:
    """Raises ValueError with what is wrong."""
    is_cuda = arguments.device == "cuda"
    fields = {
        "model": arguments.model or ("llama-70b" if is_cuda else "llama-8b"),
        "devices": Devices.of(arguments.device, is_one_gpu=arguments.one_gpu),
        "prefill_tp": arguments.prefill_tp or (4 if is_cuda else 1),
        "decode_tp": arguments.decode_tp or (2 if is_cuda else 1),
        "prefill_page_size": arguments.prefill_page_size,
        "decode_page_size": arguments.decode_page_size,
        "decode_order": arguments.decode_order,
        "chunk_tokens": arguments.chunk_tokens or (4096 if is_cuda else 512),
        "layers_per_group": arguments.layers_per_group,
        "num_slots": arguments.slots,
        "ring_bytes": (arguments.ring_mb or (2048 if is_cuda else 256)) << 20,
        "asks_ahead": not arguments.asks_late,
    }
    bare = Setting(**fields)
    cases = []
    for size in arguments.mb or ([320.0] if is_cuda else [64.0]):
        for in_flight in arguments.in_flight:
            tokens = bare.tokens_of(int(size * (1 << 20)))
            if in_flight > 1 and in_flight * bare.moved_bytes(tokens) > _MOST_POOL_BYTES[arguments.device]:
                continue
            for piece_mb in arguments.piece_mb:
                piece_bytes = int(piece_mb * (1 << 20)) or None
                cases.append(Case(num_tokens=tokens, in_flight=in_flight, piece_bytes=piece_bytes))
    return Setting(**fields, cases=tuple(dict.fromkeys(cases)))


def parser() -> ArgumentParser:
    """What is left out is as the nodes have it by default, but for what a GPU needs."""
    made = argument_parser("paged pool to paged pool between two processes")
    made.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    made.add_argument("--one-gpu", action="store_true", help="both ends on one GPU, also where there are two")
    made.add_argument("--lanes", nargs="+", choices=LANES, metavar="LANE", help=f"of {', '.join(LANES)}; ucx by default")
    made.add_argument("--peers", action="store_true", help="also what others do with the same bytes")
    made.add_argument("--sglang-wheel", type=Path, help="its wheel, or a directory with its files; pip downloads it by default")
    made.add_argument("--mb", type=float, nargs="+", help="MiB of KV a request; 64, or 320 on GPUs")
    made.add_argument("--in-flight", type=int, nargs="+", default=[1, 4], metavar="N", help="requests at a time")
    made.add_argument("--rounds", type=int, default=25)
    made.add_argument("--asks-late", action="store_true", help="grants are asked for when the KV is computed, not before")
    made.add_argument("--model", choices=tuple(MODELS), help="llama-8b, or llama-70b on GPUs")
    made.add_argument("--prefill-tp", type=int, help="rank 0 of it is measured; 1, or 4 on GPUs")
    made.add_argument("--decode-tp", type=int, help="1, or 2 on GPUs")
    made.add_argument("--prefill-page-size", type=int, default=16)
    made.add_argument("--decode-page-size", type=int, default=32)
    made.add_argument("--decode-order", choices=("NHD", "HND"), default="NHD")
    made.add_argument("--chunk-tokens", type=int, help="512, or 4,096 on GPUs")
    made.add_argument("--layers-per-group", type=int, help="layers per chunk, 0 for all; by default the probe decides")
    made.add_argument(
        "--piece-mb", type=float, nargs="+", default=[0.0], metavar="N", help="largest piece in MiB; 0: as without this"
    )
    made.add_argument("--slots", type=int, default=StagingConfig().num_slots)
    made.add_argument("--ring-mb", type=int, help="256, or 2,048 on GPUs")
    return made


def main() -> int:
    made = parser()
    arguments = made.parse_args()
    try:
        setting = setting_of(arguments)
        assert setting.config
    except (ValueError, ConfigError, PairFailed) as error:
        made.error(str(error))
    num_rounds = min(3, arguments.rounds) if arguments.quick else arguments.rounds
    lanes = arguments.lanes or ["ucx"]
    report, is_failed = measure(
        setting,
        lanes,
        num_rounds=num_rounds,
        has_peers=arguments.peers,
        wheel=arguments.sglang_wheel,
        json_path=arguments.json,
    )
    report.finish(arguments.json)
    return int(is_failed)


if __name__ == "__main__":
    sys.exit(main())
