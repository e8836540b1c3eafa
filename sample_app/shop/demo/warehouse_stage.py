"""The warehouse: AT_LEAST_ONCE, eight requests at once in each worker."""

from __future__ import annotations

from sample_app.shop.demo.moods import scatter
from sample_app.shop.demo.rounds import come_back
from sample_app.shop.demo.screen import Screen
from sample_app.shop.demo.warehouse_audit import audit
from sample_app.shop.demo.warehouse_stub import Mood, WarehouseStub
from sample_app.shop.demo.workers import run_workers
from sample_app.shop.processors import push_to_warehouse

CONCURRENCY = ("--concurrency", "8")
ONE_IN = {Mood.DOWN: 40, Mood.CONFUSED: 60, Mood.SILENT: 400}


def run(screen: Screen, workers: int) -> bool:
    """Race the workers, come back for failed rows; True if the audit is clean."""
    due = set(push_to_warehouse.pending().order_by().values_list("number", flat=True))
    screen.step("due", f"{len(due):,} paid orders are to be packed")
    with WarehouseStub(scatter(sorted(due), ONE_IN)) as stub:
        environment = {"WAREHOUSE_URL": stub.url}
        screen.step("server", f"local server at {stub.url}: always slow, now and then failing")
        with screen.counting("orders", len(due), lambda: len(stub.log)) as watch:
            shares = run_workers(
                push_to_warehouse.name,
                workers,
                options=CONCURRENCY,
                watch=watch,
                environment=environment,
            )
        screen.shares(shares)
        shares += come_back(screen, push_to_warehouse, environment, options=CONCURRENCY)
        verdict = audit(due, stub.log, leases_lost=sum(share.lease_lost for share in shares))
    screen.verdict(verdict)
    return verdict.clean and all(share.came_to_the_end for share in shares)
