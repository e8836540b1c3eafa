from __future__ import annotations

from django.db.models import Q

from dcl_processor import Delivery, Lease, batch_processor
from tests.ported import outside
from tests.ported.models import Item


@batch_processor(
    pending=lambda: Item.objects.filter(state="new"),
    done=lambda item, answer: {"state": "done", "result": answer},
    delivery=Delivery.AT_LEAST_ONCE,
    lease=Lease(60),
)
def for_agents(item: Item) -> str:
    raise NotImplementedError


def pull(agent: str) -> list[tuple[str, str]]:
    return [(each.token, each.row.name) for each in for_agents.reserve(1, bound_to=agent)]


def report(agent: str, token: str, answer: str) -> None:
    for_agents.reservation(token, bound_to=agent).settle(answer)


def poll() -> None:
    while rows := pull("agent"):
        for token, name in rows:
            report("agent", token, outside.ask(name))


@batch_processor(
    pending=lambda: Item.objects.filter(state="new"),
    done=lambda item, answer: {"state": "done", "result": answer},
    delivery=Delivery.AT_MOST_ONCE,
    claim={"state": "review"},
    claimed_at="started_at",
)
def for_people(item: Item) -> str:
    raise NotImplementedError


def take() -> list[str]:
    return [each.token for each in for_people.reserve(1, filter=~Q(worker="anna"))]


def next_for_a_person() -> None:
    for token in take():
        for_people.reservation(token).settle("yes")
