"""`kvferry demo --offload`: what is stored by one run is found by the next."""

from __future__ import annotations

import io

from rich.console import Console

from kvferry.demo_offload import Figures, OffloadReport
from kvferry.demo_print import print_report
from kvferry.demo_report import make_report
from transfer.pb import kvferry_pb2 as pb

PAGE = """# HELP kvferry_host_pages x
# TYPE kvferry_host_pages gauge
kvferry_host_pages{group="full",role="decode",state="free"} 3.0
kvferry_host_pages{group="full",role="decode",state="held"} 4.0
kvferry_host_pages{group="window_8",role="decode",state="held"} 50.0
# HELP kvferry_store_bytes_total x
# TYPE kvferry_store_bytes_total counter
kvferry_store_bytes_total{op="put",rank="0",role="decode"} 5.0
kvferry_store_bytes_total{op="put",rank="1",role="decode"} 6.0
"""


def test_figures_are_sums_over_ranks_and_states() -> None:
    figures = Figures(PAGE)
    assert figures.sum("host_pages", group="full") == 7
    assert figures.sum("store_bytes_total", op="put") == 11
    assert figures.sum("store_bytes_total", op="get") == figures.sum("nothing") == 0


def test_pages_that_could_not_be_stored_are_shown() -> None:
    def shown(unstored: int) -> str:
        numbers = dict.fromkeys((one for one in OffloadReport.__dataclass_fields__), 1) | {"unstored_pages": unstored}
        console = Console(width=120, record=True, file=io.StringIO())
        report = make_report(
            [], [], decode=pb.NodeStatus(), leaked=(), seconds=1.0, generate_seconds=1.0, dtype="float32", environment={},
            offload=OffloadReport(**numbers),
        )  # fmt: skip
        print_report(console, report)
        return console.export_text()

    assert "could not be stored" in shown(3) and "could not be stored" not in shown(0)
