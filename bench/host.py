"""What the hosts do for a request besides moving its bytes: with real loops and control planes, and copies that only last.

    python -m bench.host [--json FILE] [--quick] [--mb 20] [--gb-per-s 24] [--in-flight 1 4 16 64] [--piece-mb 20] [--ring-mb 128]

As `bench.pool_to_pool`, but gathers and scatters move nothing, and last as long as they would on a link of so many GB/s (0: no
time), see `bench.pretended`. Sizes go together: requests of 20 MiB at 24 GB/s keep a link busy for as long as 320 MiB keep an
NVLink, and a ring of 128 MiB holds as many of them as one of 2 GiB does. So what bounds a fast link can be looked at where there
is none: the ratio is what the link would be used to. Lone requests of one piece also show the ways between the stages.
"""

from __future__ import annotations

import math
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import replace

from bench.pair import Devices, PairFailed
from bench.pool_rounds import play
from bench.pool_setting import Case, Setting
from bench.pool_to_pool import Measured
from bench.timing import Report, argument_parser
from transfer.config import StagingConfig

LANE = "pretended"
LINK = "the link alone"
_TIMEOUT_S = 150.0
_MIB = 1 << 20


def setting_of(arguments: Namespace) -> Setting:
    """Raises ValueError with what is wrong."""
    moved_bytes, pieces = int(arguments.mb * _MIB), [int(size * _MIB) for size in arguments.piece_mb]
    bare = Setting(
        model="llama-70b",
        devices=Devices(writer="cpu", target="cpu"),
        prefill_tp=4,
        decode_tp=2,
        decode_page_size=16,
        chunk_tokens=1,
        num_slots=StagingConfig().num_slots,
        ring_bytes=int(arguments.ring_mb * _MIB),
        # Where copies take no time, no link is ever busy.
        pretended_bytes_per_s=arguments.gb_per_s * 1e9 or math.inf,
    )
    tokens = bare.tokens_of(moved_bytes)
    cases = [Case(num_tokens=tokens, in_flight=count, piece_bytes=size) for size in pieces for count in arguments.in_flight]
    return replace(bare, chunk_tokens=tokens, cases=tuple(cases))


def measure(setting: Setting, *, num_rounds: int) -> Report:
    """Rows as those of `bench.pool_to_pool`, held against what the link alone would take.

    Raises:
        PairFailed: A process failed or died, or it took too long.
    """
    measured = Measured(setting)
    measured.report.title = f"What the hosts do: {measured.report.title}, copies pretended"
    played = play(setting, LANE, num_rounds=num_rounds, timeout_s=_TIMEOUT_S)
    for rounds in played.rounds:
        if setting.pretended_bytes_per_s != math.inf:
            moved = setting.moved_bytes(rounds.case.num_tokens)
            measured.add_limit(rounds.case, LINK, [moved / setting.pretended_bytes_per_s])
    measured.add_played(LANE, played)
    return measured.report


def parser() -> ArgumentParser:
    made = argument_parser("what hosts do for a request besides its bytes")
    made.add_argument("--mb", type=float, default=20.0, help="MiB of KV a request")
    made.add_argument("--gb-per-s", type=float, default=24.0, help="speed of the pretended link; 0: copies take no time")
    made.add_argument("--in-flight", type=int, nargs="+", default=[1, 4, 16, 64], metavar="N", help="requests at a time")
    made.add_argument("--piece-mb", type=float, nargs="+", default=[20.0], metavar="N", help="largest piece")
    made.add_argument("--ring-mb", type=float, default=128.0)
    made.add_argument("--rounds", type=int, default=25)
    return made


def main() -> int:
    made = parser()
    arguments = made.parse_args()
    try:
        setting = setting_of(arguments)
        report = measure(setting, num_rounds=min(3, arguments.rounds) if arguments.quick else arguments.rounds)
    except (ValueError, PairFailed) as error:
        made.error(str(error))
    report.finish(arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
