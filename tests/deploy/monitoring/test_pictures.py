"""Rows of the dashboards are drawn without Prometheus: each chart has room for its legend."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from matplotlib.image import imread

from deploy.monitoring.charts import Chart
from deploy.monitoring.pictures import MAIN, MAX_LEGEND, Series, View, draw, row_of


class Invented(View):
    """As many series as a legend names, and one more."""

    def series(self, chart: Chart) -> Iterator[Series]:
        for index in range(MAX_LEGEND + 1):
            name = f"{chart.lines[0].legend} of prefill-{index}"
            yield Series(name=name, times_s=(0.0, 60.0, 120.0), values=(0.0, 0.137 * index, 0.05))


@pytest.mark.parametrize("name", MAIN)
def test_long_legends_leave_room_for_the_charts(name: str, tmp_path: Path) -> None:
    file = tmp_path / "row.png"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib warns when charts collapse
        draw(row_of(*MAIN[name]), Invented(url="", begin_s=0, end_s=120, rate_interval="8s", chosen={}), file)
    pixels = imread(file)[..., :3]
    assert (pixels[-1] == 1).all() and (pixels[:, -1] == 1).all(), "the picture cuts something off"
