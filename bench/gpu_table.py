"""What kvferry has to reach on GPUs, read from the reports of the suite's parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from bench.link import FUSED, FUSED_WITH_DIGEST, NIXL_BULK
from bench.pool_to_pool import NIXL_BULK as POOL_NIXL_BULK
from bench.pool_to_pool import POOL_TO_POOL, SGLANG
from bench.table import LARGE_BYTES, TARGET_OF_LIBRARY, Content, Outcome

_WHOLE_BYTES = 300 << 20  # a request of 336 MB

TARGET_KERNEL = 0.97  # of a copy of the same bytes on the device
TARGET_KERNEL_WITH_DIGEST = 0.94
TARGET_CONVERSION_WITH_DIGEST = 0.9  # of a copy of as many bytes as are read and written
TARGET_HOST_S = 25e-6  # of a gather call with everything prepared, in steady state
TARGET_FUSED = 0.92  # of the copy engine's copy into the same memory
TARGET_POOL_TO_POOL = 0.9  # likewise, with digest, gather and scatter, 16 requests in flight
TARGET_UCX_POOL_TO_POOL = 0.75
TARGETS_ALONE = ((_WHOLE_BYTES, 0.72), (60 << 20, 0.40), (15 << 20, 0.20))  # one request of at least these bytes
TARGET_NIXL_POOL_TO_POOL = 0.95  # of one NIXL write of the same bytes
TARGET_OF_SGLANG = 2.0  # 16 in flight against its sequence alone
TARGET_OF_SGLANG_ALONE = 1.0
TARGET_OF_DESCRIPTORS = 100.0
_FUSED_LANE = "cuda_ipc/fused"
_JUDGED_VARIANTS = ("", "other sizes")


def outcomes_of(part: str, content: Content) -> list[Outcome]:
    """Lines of the table. Those of most variants of a part are only reported."""
    kind, _, variant = part.partition(", ")
    found = list(_READERS[kind](content))
    if variant in _JUDGED_VARIANTS:
        return found
    return [
        Outcome(what=f"{one.what} ({variant})", measured=one.measured, limit=None, unit=one.unit, note=one.note) for one in found
    ]


def _kernels(content: Content) -> Iterator[Outcome]:
    """The worst case of each kind of row. Conversions have a target with digest only."""
    kinds: dict[str, list[Content]] = {}
    for row in content["rows"]:
        is_conversion = "wire" in row["case"]
        if row["ratio"] is not None or row["what"].endswith(", host"):
            kinds.setdefault(row["what"] + (", converted" if is_conversion else ""), []).append(row)
    limits = {"gather": TARGET_KERNEL, "scatter": TARGET_KERNEL}
    limits |= {f"{side} + digest": TARGET_KERNEL_WITH_DIGEST for side in ("gather", "scatter")}
    limits |= {f"{side} + digest, converted": TARGET_CONVERSION_WITH_DIGEST for side in ("gather", "scatter")}
    for what, rows in kinds.items():
        slowest = max(rows, key=lambda row: row["median_s"] if row["ratio"] is None else 1 / row["ratio"])
        name = f"{what.removesuffix(', host')}, worst of {len(rows)}"
        if slowest["ratio"] is None:
            yield Outcome(
                what=f"host time of {name}",
                measured=slowest["median_s"] * 1e6,
                limit=TARGET_HOST_S * 1e6 if what == "gather + digest, host" else None,
                bound="below",
                unit="us a call",
                note=slowest["case"],
            )
        else:
            unit = f"of a {slowest['ratio_to'].partition(' (')[0]}"
            yield Outcome(what=name, measured=slowest["ratio"], limit=limits.get(what), unit=unit, note=slowest["case"])


def _link(content: Content) -> Iterator[Outcome]:
    for row in content["rows"]:
        note = "" if row["gb_per_s"] is None else f"{row['gb_per_s']:.1f} GB/s, median {row['median_s'] * 1e6:.0f} us"
        if row["what"] in (FUSED, FUSED_WITH_DIGEST):
            is_judged = row["what"] == FUSED and row["bytes"] >= LARGE_BYTES
            yield Outcome(
                what=f"{row['what'].removeprefix('kvferry, ')}: {row['case'].partition(' of ')[0]}",
                measured=row["ratio"],
                limit=TARGET_FUSED if is_judged else None,
                unit="of peer memcpy",
                note=note,
            )
        elif row["what"].startswith("kvferry ") and row["bytes"] >= LARGE_BYTES and "answer" not in row["what"]:
            is_judged = row["ratio_to"].startswith(NIXL_BULK)
            yield Outcome(
                what=f"{row['what'].removeprefix('kvferry ')}, one write of {row['case']}",
                measured=row["ratio"],
                limit=TARGET_OF_LIBRARY if is_judged else None,
                unit=f"of {row['ratio_to'].partition(' (')[0]}",
                note=note,
            )
        elif row["bytes"] >= LARGE_BYTES and row["gb_per_s"] is not None:
            yield Outcome(what=f"{row['what']}: {row['case']}", measured=row["gb_per_s"], limit=None, unit="GB/s")


def _pool_to_pool(content: Content) -> Iterator[Outcome]:
    rows = {(row["case"], row["what"]): row for row in content["rows"]}
    for (case, what), row in rows.items():
        if not what.endswith(f", {POOL_TO_POOL}"):
            if not what.startswith("kvferry ") and row["gb_per_s"] is not None:
                yield Outcome(what=f"{what}: {case}", measured=row["gb_per_s"], limit=None, unit="GB/s")
            continue
        lane = what.removeprefix("kvferry ").removesuffix(f", {POOL_TO_POOL}")
        is_alone, is_many = case.endswith(", 1 in flight"), case.endswith(", 16 in flight") and row["bytes"] >= _WHOLE_BYTES
        of_lane: dict[str, float | None] = {_FUSED_LANE: TARGET_POOL_TO_POOL, "ucx": TARGET_UCX_POOL_TO_POOL} if is_many else {}
        if is_alone:
            of_lane = {_FUSED_LANE: next((target for least, target in TARGETS_ALONE if row["bytes"] >= least), None)}
        facts = content["facts"][f"{case}, {lane}"]
        note = f"{row['gb_per_s']:.1f} GB/s, {row['median_s'] * 1e6:.0f} us, {facts['chunks_per_request']} chunks"
        name = f"{lane}, {case}"
        yield Outcome(
            what=f"pool to pool, {name}",
            measured=row["ratio"],
            limit=of_lane.get(lane),
            unit=f"of {row['ratio_to'].partition(' (')[0]}",
            note=note,
        )
        limits: dict[str, float | None] = {}
        if is_many and lane in (_FUSED_LANE, "nixl"):
            limits = {
                SGLANG: TARGET_OF_SGLANG if lane == _FUSED_LANE else None,
                POOL_NIXL_BULK: TARGET_NIXL_POOL_TO_POOL if lane == "nixl" else None,
                "NIXL descriptors": TARGET_OF_DESCRIPTORS if lane == _FUSED_LANE else None,
            }
        elif is_alone and lane == _FUSED_LANE and row["bytes"] >= _WHOLE_BYTES:
            limits = {SGLANG: TARGET_OF_SGLANG_ALONE}
        for peer, limit in limits.items():
            theirs = _of_peer(rows, case, peer)
            if theirs is not None:
                times = theirs["median_s"] / row["median_s"]
                yield Outcome(what=f"  against {peer}", measured=times, limit=limit, unit="x its speed")


def _of_peer(rows: dict[tuple[str, str], Content], case: str, peer: str) -> Content | None:
    """The peer's row of those bytes; it sends one request after the other. That of its descriptors is named by their number."""
    case = f"{case.partition(',')[0]}, 1 in flight"
    if peer != "NIXL descriptors":
        return rows.get((case, peer))
    return next((row for (of, what), row in rows.items() if of == case and "descriptors of" in what), None)


_READERS: dict[str, Callable[[Content], Iterator[Outcome]]] = {
    "kernels": _kernels,
    "link": _link,
    "pool to pool": _pool_to_pool,
}
