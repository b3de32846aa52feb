"""Pages between the device pool and the host pool, against a plain pinned copy of the same bytes in the same run.

    python -m bench.offload_copies [--json FILE] [--quick] [--device cpu|cuda] [--mb N] [--buffer-mb 64]
        [--io-backend auto|kernel|copies]

Calls of `PageMover` are timed from the call to its return, with everything that the host does for them, and alternate with their
yardstick: one copy of as many contiguous bytes between the device and memory that torch has pinned. The device's pages come in
random order. The host's follow each other ("in order"), as an allocator binds them that has room, or are a random half of the
pool's ("in no order"). On a CPU both pools are in host memory, and the yardstick is a copy by one thread.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import get_args

import torch

from bench.timing import Report, argument_parser, readable_bytes, sample
from transfer.copy.page_mover import PageMove, PageMover
from transfer.copy.page_segments import IoBackend
from transfer.layer_groups import layer_groups
from transfer.layout import DType, KVLayout, LayerKind, LayerSpec, Shard, TokenOrder
from transfer.pool.host_pool import HostPool
from transfer.pool.kv_pool import KVPool

TARGET_RATIO = 0.9  # of the plain pinned copy; pages whose host pages follow each other
PLAIN = "plain copy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """What a rank of some model keeps of a token.

    Args:
        heads: KV heads of the rank; 1 of latents.
        dim: Elements of a head's K, and of its V where there is one.
    """

    name: str
    num_layers: int
    heads: int
    page_size: int
    dim: int = 128
    is_latent: bool = False
    order: TokenOrder = TokenOrder.NHD
    dtype: DType = DType.BFLOAT16

    def layout(self) -> KVLayout:
        spec = LayerSpec(
            kind=LayerKind.MLA if self.is_latent else LayerKind.ATTENTION,
            num_kv_heads=self.heads,
            k_head_dim=self.dim,
            v_head_dim=0 if self.is_latent else self.dim,
        )
        return KVLayout(layers=(spec,) * self.num_layers, dtype=self.dtype)


_LLAMA_8B = Geometry(name="Llama-3-8B TP1", num_layers=32, heads=8, page_size=16)
_LLAMA_70B = Geometry(name="Llama-3-70B TP4", num_layers=80, heads=2, page_size=16)
_LATENT = Geometry(name="DeepSeek-V3 latents", num_layers=61, heads=1, page_size=64, dim=576, is_latent=True)
GEOMETRIES = (
    *(replace(_LLAMA_8B, page_size=size) for size in (1, 16, 64)),
    replace(_LLAMA_8B, name="Llama-3-8B TP1 HND", order=TokenOrder.HND),
    replace(_LLAMA_8B, name="Llama-3-8B TP1 float8", dtype=DType.FLOAT8_E4M3),
    *(replace(_LLAMA_70B, page_size=size) for size in (16, 64)),
    *(replace(_LATENT, page_size=size) for size in (1, 64)),
)


def measure(
    geometries: Sequence[Geometry],
    *,
    device: str,
    num_bytes: int,
    buffer_bytes: int,
    repetitions: int,
    io_backend: IoBackend = "auto",
) -> Report:
    name = torch.cuda.get_device_name() if device == "cuda" else "a CPU"
    report = Report(title=f"Pages saved to and loaded from host memory on {name}, against a plain copy of the same bytes")
    for geometry in geometries:
        _measure(report, geometry, device, num_bytes, buffer_bytes, repetitions, io_backend)
    ratios = [row.ratio for row in report.rows if row.ratio is not None and "in order" in row.what]
    report.headline["worst_ratio"] = min(ratios)
    report.headline["must_reach"] = TARGET_RATIO
    return report


def _measure(
    report: Report,
    geometry: Geometry,
    device: str,
    num_bytes: int,
    buffer_bytes: int,
    repetitions: int,
    io_backend: IoBackend,
) -> None:
    layout, shard = geometry.layout(), Shard(page_size=geometry.page_size, order=geometry.order)
    (group,) = layer_groups(layout)
    page_bytes = group.page_bytes(layout, shard)
    count = max(2, num_bytes // page_bytes)
    pool = KVPool(layout=layout, shard=shard, num_pages=count, device=device)
    host = HostPool(pool, num_pages=[2 * count])  # half of them are used: in no order few follow each other
    mover = PageMover(pool, host, buffer_bytes=max(buffer_bytes, 2 * page_bytes), io_backend=io_backend)
    mover.compile()
    device_pages, host_pages = (
        torch.randperm(most, generator=torch.Generator().manual_seed(most)).tolist()[:count] for most in (count, 2 * count)
    )
    in_order = [PageMove(group=0, device_pages=device_pages, host_pages=range(count))]
    in_no_order = [PageMove(group=0, device_pages=device_pages, host_pages=host_pages)]
    total = count * page_bytes
    device_bytes = torch.ones(total, dtype=torch.uint8, device=device)
    host_bytes = torch.ones(total, dtype=torch.uint8, pin_memory=device == "cuda")
    for side, call in (("save", mover.save), ("load", mover.load)):
        source, target = (device_bytes, host_bytes) if side == "save" else (host_bytes, device_bytes)
        calls: dict[str, Callable[[], object]] = {
            PLAIN: lambda target=target, source=source: _copy(target, source),  # type: ignore[misc]
            f"{side}, in order": lambda call=call: call(in_order),  # type: ignore[misc]
            f"{side}, in no order": lambda call=call: call(in_no_order),  # type: ignore[misc]
        }
        samples_s: dict[str, list[float]] = {what: [] for what in calls}
        for repetition in range(-2, repetitions):
            for what, one in calls.items():
                (seconds,) = sample(one, repetitions=1, warmup=0)
                if repetition >= 0:
                    samples_s[what].append(seconds)
        case = f"{geometry.name}, {count} pages of {geometry.page_size} ({readable_bytes(page_bytes)}), {side}"
        plain = report.add(case, PLAIN, samples_s.pop(PLAIN), num_bytes=total)
        for what, found_s in samples_s.items():
            report.add(case, what, found_s, num_bytes=total, against=plain)
    host.close()


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)
    if target.is_cuda or source.is_cuda:
        torch.cuda.synchronize()


def parser() -> argparse.ArgumentParser:
    made = argument_parser("pages saved to and loaded from host memory, against a plain copy")
    made.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    made.add_argument("--mb", type=int, help="MiB that a call moves; 1024 on a GPU, 64 on a CPU, an eighth with --quick")
    made.add_argument("--buffer-mb", type=int, default=64, help="MiB of the device in which pages are packed")
    made.add_argument("--io-backend", choices=get_args(IoBackend), default="auto", help="how pages cross the link of a GPU")
    return made


def main() -> None:
    arguments = parser().parse_args()
    if arguments.device == "cpu":
        torch.set_num_threads(1)
    default_mb = (1024 if arguments.device == "cuda" else 64) // (8 if arguments.quick else 1)
    measure(
        GEOMETRIES[:2] if arguments.quick and arguments.device == "cpu" else GEOMETRIES,
        device=arguments.device,
        num_bytes=(arguments.mb or default_mb) << 20,
        buffer_bytes=arguments.buffer_mb << 20,
        repetitions=3 if arguments.quick else 10,
        io_backend=arguments.io_backend,
    ).finish(arguments.json)


if __name__ == "__main__":
    main()
