"""Copies that go wrong differ from workers that had nothing to do."""

from __future__ import annotations

import pytest

from sample_app.shop.demo.workers import Share, run_workers


def test_a_copy_that_cannot_start_says_why(
    empty_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DJANGO_SETTINGS_MODULE", "sample_app.settings")
    monkeypatch.setenv("DATABASE_URL", empty_database)
    watched: list[int] = []

    shares = run_workers("shop.no_such_thing", 2, watch=watched.extend)

    assert [(share.worker, share.processed, share.exit_code) for share in shares] == [
        (1, 0, 2),
        (2, 0, 2),
    ]
    assert not any(share.came_to_the_end or share.killed for share in shares)
    assert all("shop.send_shipped_emails" in share.complaint for share in shares)
    assert len(set(watched)) == 2


@pytest.mark.parametrize(
    ("exit_code", "failed", "came_to_the_end", "killed"),
    [
        (0, 0, True, False),
        (1, 3, True, False),
        (1, 0, False, False),
        (0, 3, True, False),
        (2, 0, False, False),
        (-9, 0, False, True),
        (-15, 0, False, False),
    ],
)
def test_rows_that_failed_are_no_trouble_of_the_copys(
    exit_code: int, failed: int, came_to_the_end: bool, killed: bool
) -> None:
    share = Share(1, 5, failed, 0, 0.1, exit_code, "")
    assert (share.came_to_the_end, share.killed) == (came_to_the_end, killed)
