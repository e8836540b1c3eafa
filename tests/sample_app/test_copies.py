"""Copies that go wrong are told apart from copies that had nothing to do."""

from __future__ import annotations

import pytest

from sample_app.shop.demo.copies import run_copies


def test_a_copy_that_cannot_start_says_why(
    empty_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DJANGO_SETTINGS_MODULE", "sample_app.settings")
    monkeypatch.setenv("DATABASE_URL", empty_database)
    watched = []

    shares = run_copies("shop.no_such_thing", 2, "dummymail://", watch=lambda: watched.append(True))

    assert [(share.copy, share.sent, share.exit_code) for share in shares] == [(1, 0, 2), (2, 0, 2)]
    assert all("shop.send_shipped_emails" in share.complaint for share in shares)
    assert watched
