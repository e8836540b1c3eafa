"""A server that is away while rows are claimed and not yet handled."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from django.db import OperationalError, connection, connections

from dcl_processor import Lease
from tests.contract.support import errands as the
from tests.contract.support.reports import assert_run
from tests.contract.support.sessions import end_session
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


@dataclass
class Server:
    """Refuses so many of a session's attempts to connect, once it has gone away."""

    refuses: int = 0
    calls: list[int] = field(default_factory=list)
    called_meanwhile: list[int] = field(default_factory=list)

    def handle(self, row: Errand) -> None:
        if self.refuses:
            self.called_meanwhile.append(row.place)
        self.calls.append(row.place)
        if row.place == 0:
            self.refuses = 8
            end_session()

    def connect(self, params: Any) -> Any:
        if self.refuses:
            self.refuses -= 1
            raise OperationalError("no server")
        default = connections["default"]
        return type(default).get_new_connection(default, params)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    server = Server()
    connection.ensure_connection()
    monkeypatch.setattr(connections["default"], "get_new_connection", server.connect)
    return server


def retries(make: the.Make) -> dict[str, Any]:
    return {} if make is the.at_most_once else {"retry": the.retry()}


def short(make: the.Make) -> dict[str, Any]:
    """Return the options with which a run does not hold on to what it cannot settle."""
    return retries(make) if make is the.at_most_once else {**retries(make), "lease": Lease(2)}


if connection.vendor != "sqlite":  # which has no server

    @the.each_delivery
    def test_no_handler_is_called_until_it_is_back(make: the.Make, server: Server) -> None:
        the.errands(5)
        run = make(server.handle, batch_size=5, **retries(make))
        assert_run(run(), processed=5)
        assert server.called_meanwhile == []
        assert server.calls == [*range(5)]
        assert Errand.objects.filter(done=True, attempts=0, leased_until=None).count() == 5

    @the.each_delivery
    def test_if_it_does_not_come_back_no_handler_is_called(make: the.Make, server: Server) -> None:
        the.errands(5)

        def handle(row: Errand) -> None:
            server.handle(row)
            server.refuses = 10**9

        with pytest.raises(OperationalError, match="no server"):
            make(handle, batch_size=5, **short(make))()
        server.refuses = 0
        assert server.calls == [0]

    def test_the_rest_of_a_batch_in_a_lost_transaction_is_not_called(server: Server) -> None:
        the.errands(5)

        def handle(row: Errand) -> None:
            lost = server.calls == []
            server.handle(row)
            server.refuses = 10**9 if lost else 0

        run = the.transactional(handle, batch_size=5)
        with pytest.raises(OperationalError, match="no server"):
            run()
        server.refuses = 0
        assert server.calls == [0]
        assert Errand.objects.filter(done=False, attempts=0).count() == 5
