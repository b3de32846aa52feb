"""What is said once, and then once a minute."""

from __future__ import annotations

import pytest

from node_runtime import reminders
from node_runtime.reminders import Reminders


def test_the_same_news_are_due_once_and_again_a_minute_later(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(reminders.time, "monotonic", lambda: now_s)
    news = Reminders()
    assert news.is_due("away") and not news.is_due("away") and news.is_due("does not fit")
    now_s = 59.9
    assert not news.is_due("away")
    now_s = 60.0
    assert news.is_due("away") and not news.is_due("away")
    news.clear()
    assert news.is_due("away")


def test_made_up_news_take_no_memory_without_end() -> None:
    news = Reminders()
    assert sum(news.is_due(number) for number in range(5000)) == 1024
