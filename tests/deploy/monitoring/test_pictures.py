"""Rows of dashboards as pictures: what is asked, named and drawn. A real Prometheus is in test_live_dashboards.py."""

from __future__ import annotations

import json
import math
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from matplotlib.image import imread

from deploy.monitoring import pictures
from deploy.monitoring.charts import Chart, Line, Row, Unit
from deploy.monitoring.pictures import MAIN, View, named_by, row_of, shown

STEP_S = 10
"""Of a picture of 240 points."""


class _Canned(BaseHTTPRequestHandler):
    """Answers as Prometheus does, two series with a hole in one; or refuses what has "wrong" in it."""

    def do_GET(self) -> None:
        if "wrong" in self.path:
            code, body = 400, {"status": "error", "error": "parse error: unexpected end of input"}
        else:
            with_hole = [[at, str(at % 7)] for at in range(1000, 1100, STEP_S) if at != 1050]
            whole = [[at, "NaN" if at == 1000 else "3"] for at in range(1000, 1100, STEP_S)]
            result = [
                {"metric": {"instance": "d:7180", "rank": "0"}, "values": with_hole},
                {"metric": {"instance": "d:7180", "rank": "1"}, "values": whole},
            ]
            code, body = 200, {"status": "success", "data": {"resultType": "matrix", "result": result}}
        self.send_response(code)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Canned) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def view(url: str) -> View:
    return View(url=url, begin_s=1000, end_s=1000 + 240 * STEP_S, rate_interval="20s", chosen={"role": "decode"})


def chart(expr: str = "up", **how: object) -> Chart:
    line = Line(expr=expr, legend="{{instance}} rank {{rank}}")
    return Chart(title="t", description="d", unit=Unit.SECONDS, lines=(line,), **how)  # type: ignore[arg-type]


def test_variables_and_the_interval_are_filled_in(url: str) -> None:
    asked = view(url).asked('rate(a{job=~"$job", role=~"$role"}[$__rate_interval])')
    assert asked == 'rate(a{job=~".*", role=~"decode"}[20s])'


def test_series_have_their_legends_and_gaps(url: str) -> None:
    first, second = view(url).series(chart())
    assert (first.name, second.name) == ("d:7180 rank 0", "d:7180 rank 1")
    assert [at for at, value in zip(first.times_s, first.values, strict=True) if math.isnan(value)] == [1060.0]
    assert [at for at, value in zip(second.times_s, second.values, strict=True) if math.isnan(value)] == [1000.0]


def test_nodes_are_called_the_same_in_every_chart_and_axes_have_units() -> None:
    names = named_by(["10.0.0.2:7180 rank 0", "p50", "10.0.0.1:7180: run"])
    assert names == {"10.0.0.1:7180": "node 1", "10.0.0.2:7180": "node 2"}
    values = ((Unit.SHARE, 0.125), (Unit.SECONDS, 0.0025), (Unit.SECONDS, 90), (Unit.BYTES, 0), (Unit.BYTES_PER_S, 3 * 2**29))
    assert [shown(unit)(value, None) for unit, value in values] == ["12.5 %", "2.5 ms", "90 s", "0 B", "1.5 GiB/s"]


def test_a_row_is_drawn_as_wide_as_on_the_dashboard(url: str, tmp_path: Path) -> None:
    charts = (chart(columns=12, is_stacked=True), chart(columns=12, fine=2, bad=5), chart(columns=8, most=1.0))
    pictures.draw(Row(title="r", charts=charts), view(url), tmp_path / "row.png")
    height, width, _ = imread(tmp_path / "row.png").shape
    assert (width, height) == (1200, 450), "16 inches, two lines of 3, at 75 points"


def test_the_rows_that_are_drawn_by_default_exist() -> None:
    for dashboard, title in MAIN.values():
        assert row_of(dashboard, title).title == title
    with pytest.raises(ValueError, match=r"no row Hurry on link; there are .*link: Speed"):
        row_of("link", "Hurry")


def test_a_refused_query_is_named_and_an_absent_prometheus_is_one_line(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(OSError, match="unexpected end of input"):
        list(view(url).series(chart("wrong(")))
    with socket.socket() as held:  # bound, and nobody listens
        held.bind(("127.0.0.1", 0))
        assert pictures.main(["--prometheus", f"http://127.0.0.1:{held.getsockname()[1]}", "--out", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "Connection refused" in said and said.count("\n") == 1
