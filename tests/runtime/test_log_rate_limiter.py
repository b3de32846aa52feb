"""Log lines that are written at most once a minute."""

from __future__ import annotations

from transfer.log_rate_limiter import LogRateLimiter


def test_made_up_news_take_no_memory_without_end() -> None:
    news = LogRateLimiter()
    assert sum(news.is_due(number) for number in range(5000)) == 1024
