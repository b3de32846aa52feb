"""The status pages of a running cluster in a real browser."""

from __future__ import annotations

import pytest

from kvferry.local_cluster import ClusterNode
from tests.cluster.conftest import model, reference
from tests.deploy.page.chromium import Tab
from tests.serving.conftest import Serving, serving

__all__ = ["model", "reference", "serving"]


def url_of(node: ClusterNode) -> str:
    return f"http://{node.http_address}/"


def test_the_pages_of_both_tiers_under_load(browser: Tab, serving: Serving) -> None:
    prefill, decode = serving.cluster.nodes
    browser.start_anew()
    with serving.load():
        browser.open(url_of(decode))
        browser.until("document.querySelectorAll('#prefill .card').length === 1")
        browser.until("document.querySelectorAll('#prefill .meters').length === 1")
        browser.until("[...document.querySelectorAll('#links td')].some(cell => cell.innerText.includes('of probe'))")
        browser.until("[...document.querySelectorAll('#requests .state')].some(one => one.innerText === 'generating')")
        shown = browser.value("""[...document.querySelectorAll('[role=meter]')].map(bar => [
            Number(bar.ariaValueNow), Number(bar.ariaValueMax), bar.ariaLabel,
            [...bar.querySelectorAll('i:not(.held)')].reduce((sum, part) => sum + part.getBoundingClientRect().width, 0)
                / bar.getBoundingClientRect().width])""")
        for now, most, label, width in shown:
            assert width == pytest.approx(min(1.0, now / most), abs=0.01), label
        assert {label for _, _, label, _ in shown} >= {"pool full", "staging", "ring of rank 0", "link probe", "generated tokens"}
        states = browser.value("[...document.querySelectorAll('#prefill .card .state')].map(one => one.innerText)")
        assert states == ["ready"]
        addresses = browser.value("[...document.querySelectorAll('#prefill .card')].map(card => card.dataset.address)")
        assert addresses == [prefill.address]
        ids = browser.value("[...document.querySelectorAll('#requests td:first-child')].map(cell => cell.innerText)")
        assert any("story" in one for one in ids), ids
        assert browser.said == []
        own = {url_of(decode), f"{url_of(decode)}status.json"}
        assert {one for one in browser.requested if not one.startswith("data:")} == own

        browser.open(url_of(prefill))
        browser.until("document.querySelectorAll('#decode .card .meters').length === 1")
        assert browser.value("document.querySelectorAll('#prefill .card').length") == 1, "it sees whom it is joined with"
        assert browser.said == []
