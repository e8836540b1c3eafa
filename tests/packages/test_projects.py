"""A project that has another package installed, made from nothing, and what its commands print."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.databases import database_url
from tests.docs.reader import empty_database
from tests.environments import CHECKOUT
from tests.waiting import PATIENCE

pytestmark = pytest.mark.django_db(transaction=True)

SETTINGS = """
from environ import Env
SECRET_KEY, USE_TZ, DEFAULT_AUTO_FIELD = "none", True, "django.db.models.BigAutoField"
DATABASES = {"default": Env().db_url("DATABASE_URL")}
INSTALLED_APPS = ["django.contrib.contenttypes", "dcl_processor", "shop"]
SILENCED_SYSTEM_CHECKS = ["dcl_processor.W011"]
"""
MANAGE = """
import os, sys
if __name__ == "__main__":
    os.environ.update(DJANGO_SETTINGS_MODULE="settings", DJANGO_CONFIGURATION="Dev")
    from django.core.management import execute_from_command_line
    execute_from_command_line(sys.argv)
"""
MODELS = """
from django.db import models
class Order(models.Model):
    done = models.BooleanField(default=False)
    leased_until = models.DateTimeField(null=True)
"""
PROCESSORS = """
import time
from functools import partial
from dcl_processor import Delivery, Lease, batch_processor
from shop.models import Order
orders = partial(batch_processor, pending=Order.objects.filter(done=False), done={"done": True})
@orders()
def ship(order):
    print("done:", Order.objects.filter(done=True).count(), flush=True)
@orders(delivery=Delivery.AT_LEAST_ONCE, lease=Lease(1))
def lease(order):
    while Order.objects.get(pk=order.pk).leased_until == order.leased_until:
        time.sleep(0.05)
@orders(delivery=Delivery.AT_MOST_ONCE)
async def send(order):
    print("orders:", await Order.objects.acount(), flush=True)
@orders(handler_timeout=60)
def limited(order):
    print("orders:", Order.objects.count(), flush=True)
"""
FILL = "from shop.models import Order; Order.objects.bulk_create(Order() for _ in range(3))"
TENANTS = """
DATABASES["default"]["ENGINE"] = "django_tenants.postgresql_backend"
DATABASE_ROUTERS = ["django_tenants.routers.TenantSyncRouter"]
SHARED_APPS = ["django_tenants", "customers", "django.contrib.contenttypes", "dcl_processor"]
TENANT_APPS, INSTALLED_APPS = ["shop"], [*SHARED_APPS, "shop"]
TENANT_MODEL, TENANT_DOMAIN_MODEL = "customers.Client", "customers.Domain"
"""
CUSTOMERS = """
from django_tenants.models import DomainMixin, TenantMixin
class Client(TenantMixin): pass
class Domain(DomainMixin): pass
"""
FOR_EACH = """
from customers.models import Client
from django_tenants.utils import schema_context
from shop.models import Order
for name in ("ann", "bob"):
    Client.objects.filter(schema_name=name).exists() or Client(schema_name=name).save()
    with schema_context(name):
"""
CREATE = f"{FOR_EACH}        Order.objects.bulk_create(Order() for _ in range(3))"
RESET = f"{FOR_EACH}        print(name, Order.objects.filter(done=True).update(done=False))"

#: Runs a command, and returns its lines.
Manage = Callable[..., list[str]]
Start = Callable[..., Manage]


def shell(code: str) -> tuple[str, ...]:
    return "shell", "--verbosity=0", "--command", code


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Write a project with changed files, migrate it, and execute what fills its tables."""
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    environment.pop("DJANGO_SETTINGS_MODULE", None)
    texts = {"settings": SETTINGS, "manage": MANAGE, "shop/__init__": ""}
    texts |= {"shop/models": MODELS, "shop/processors": PROCESSORS}

    def manage(*command: str, code: int = 0) -> list[str]:
        ran = subprocess.run(
            [sys.executable, "manage.py", *command],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE,
        )
        assert ran.returncode == code, ran.stdout + ran.stderr
        return (ran.stderr if code else ran.stdout).splitlines()

    def start(
        changed: dict[str, str], apps: tuple[str, ...] = ("shop",), fill: str = FILL
    ) -> Manage:
        for name, text in {**texts, **changed}.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
        manage("makemigrations", "--verbosity=0", *apps)
        manage(*(["migrate"] if fill == FILL else ["migrate_schemas", "--shared"]), "--verbosity=0")
        manage(*shell(fill))
        return manage

    with empty_database("packages") as name:
        environment["DATABASE_URL"] = database_url(name)
        yield start


def test_cachalot_caches_nothing_of_a_transaction_that_was_rolled_back(start: Start) -> None:
    """Each handler sees the flips of the others; none that has failed leaves its own work."""
    settings = """
INSTALLED_APPS += ["cachalot"]
CACHES = {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}}
"""
    fail = """
@orders()
def fail(order):
    Order.objects.filter(pk=order.pk).update(done=True)
    ship.process(order)
    raise ValueError("cannot be shipped")
"""
    manage = start({"settings": SETTINGS + settings, "shop/processors": PROCESSORS + fail})
    count = "print(p.Order.objects.filter(done=True).count())"
    code = f"from shop import processors as p; {count}; p.fail(); {count}; p.ship(); {count}"
    lines = [each for each in manage(*shell(code)) if each.removeprefix("done: ").isdigit()]
    assert lines == ["0", *["done: 1"] * 3, "0", "done: 0", "done: 1", "done: 2", "3"]


def test_workers_have_the_settings_of_django_configurations(start: Start) -> None:
    """It is installed below the guard of manage.py, which a worker does not run."""
    indented = SETTINGS.replace("\n", "\n    ")
    settings = f"from configurations import Configuration\nclass Dev(Configuration):{indented}"
    manage = start(
        {"settings": settings, "manage": MANAGE.replace("django.core", "configurations")}
    )
    # A handler_timeout has a child, too.
    for name, option, processed in (("limited", "--limit=1", 1), ("ship", "--workers=2", 2)):
        lines = "\n".join(manage("processors", "run", f"shop.{name}", option))
        numbers = re.findall(rf"shop\.{name}: (\d) processed", lines)
        assert sum(map(int, numbers)) == processed


def test_pghistory_and_pgtrigger_take_part_in_each_flip(start: Start) -> None:
    settings = 'INSTALLED_APPS += ["django.contrib.auth", "pgtrigger", "pghistory"]\n'
    protect = """
    class Meta:
        second = pgtrigger.Q(old__id=2)
        triggers = [pgtrigger.Protect(name="no", operation=pgtrigger.Update, condition=second)]
        del second
"""
    tracked = MODELS.replace("class", "import pghistory, pgtrigger\n\n@pghistory.track()\nclass")
    manage = start({"settings": SETTINGS + settings, "shop/models": tracked + protect})
    code = """
import pghistory
from shop.models import OrderEvent
from shop.processors import ship
with pghistory.context(by="nightly"):
    report = ship()
events = OrderEvent.objects.filter(done=True, pgh_context__metadata__by="nightly")
print([*events.order_by("pgh_obj_id").values_list("pgh_obj_id", flat=True)])
print(report.processed, report.failures[0].pk, report.failures[0].error)
"""
    *_, events, refused, _ = manage(*shell(code))
    assert events == "[1, 3]"
    assert refused == "2 2 pgtrigger: Cannot update rows from shop_order table"


def test_i18_a_run_of_django_tenants_sees_the_orders_of_one_tenant(start: Start) -> None:
    """Its further sessions would not, and are refused; workers repeat the whole command line."""
    files = {
        "settings": SETTINGS + TENANTS,
        "customers/__init__": "",
        "customers/models": CUSTOMERS,
    }
    manage = start(files, ("shop", "customers"), CREATE)
    run = ("tenant_command", "processors", "run", "shop.ship", "-s", "ann")
    *_, last = manage(*run)
    assert last.startswith("shop.ship: 3 processed")
    assert manage(*shell(RESET))[-2:] == ["ann 3", "bob 0"]
    for name in ("lease", "send"):
        said = manage(*run[:3], f"shop.{name}", *run[4:], code=1)
        assert any("got the tenant 'ann' and a processor with further ses" in each for each in said)
    manage(*run, "--workers=2")
    assert manage(*shell(RESET))[-2:] == ["ann 3", "bob 0"]
