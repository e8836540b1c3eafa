"""The parts of the edge can be deleted; ``python -m tests.deletion`` deletes each, and tests."""

from __future__ import annotations

from pathlib import Path

from tests.deletion.__main__ import IMPORT_ALL, arrows, copy, delete, parts, run
from tests.deletion.cutting import is_gone
from tests.environments import CHECKOUT
from tests.test_shape import EDGE

KNOWN = parts()

#: A processor where there is no part of the edge.
CORE = (
    """
from django.conf import settings
apps = ["dcl_processor", "django.contrib.contenttypes"]
databases = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
settings.configure(INSTALLED_APPS=apps, DATABASES=databases, USE_TZ=True)
"""
    f"""{IMPORT_ALL}
from django.contrib.contenttypes.models import ContentType
from django.core.management import call_command
from dcl_processor import batch_processor

call_command("migrate", verbosity=0)
waiting = ContentType.objects.filter(app_label="waits")
waiting.create(app_label="waits")
print(batch_processor(pending=waiting, done={{"app_label": "done"}})(lambda row: None)().processed)
"""
)


def test_the_list_has_every_part_and_what_is_its_own() -> None:
    packages = {each.package for each in KNOWN.values()}
    assert {name for name in EDGE if not is_gone(name, packages)} <= {
        "dcl_processor.alive",
        "dcl_processor.contrib",
    }
    files = [name for each in KNOWN.values() for name in each.files]
    assert [name for name in files if not (CHECKOUT / name).exists()] == []


def test_no_part_imports_another_one_that_it_is_not_built_on() -> None:
    assert [*arrows(KNOWN)] == []


def test_the_core_works_without_any_part_of_the_edge(tmp_path: Path) -> None:
    copy(tmp_path)
    delete([*KNOWN.values()], tmp_path)
    code, said = run(tmp_path, "-c", CORE)
    assert (code, said.strip().splitlines()[-1]) == (0, "1"), said
