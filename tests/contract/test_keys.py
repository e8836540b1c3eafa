"""Primary keys of unusual kinds: that cannot be known again, or are spelled in two ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connection, models
from django.test.utils import isolate_apps

from dcl_processor import batch_processor
from dcl_processor.exceptions import InvalidPending
from tests.contract.support import errands as the
from tests.contract.support.reports import assert_run
from tests.models import Errand

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


class Token:
    """A value without ``__eq__``, so that what is read twice is never the same."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        return self.text


class Odd(models.CharField):  # type: ignore[type-arg]  # no generic at run time
    """Makes of its text whatever a user likes."""

    made: Callable[[str], Any] = Token

    def from_db_value(self, value: str, *_: Any) -> Any:
        return type(self).made(value)


KEYS: dict[str, tuple[Callable[[str], Any], str]] = {
    "no __eq__": (Token, "of type Token"),
    "not a number": (lambda text: float("nan"), "got nan of type float"),
    "a list": (lambda text: [text], r"got \['0'\] of type list"),
    "a document": (lambda text: {"key": text}, "of type dict"),
    "a tuple of lists": (lambda text: ([text],), "of type tuple"),
}


@pytest.fixture
def odd() -> Iterator[Any]:
    with isolate_apps("tests"):

        class Oddity(models.Model):
            code = Odd(max_length=20, primary_key=True)
            sent = models.BooleanField(default=False)

            class Meta:
                app_label = "tests"

        with connection.schema_editor() as editor:
            editor.create_model(Oddity)
        try:
            yield Oddity
        finally:
            with connection.schema_editor() as editor:
                editor.delete_model(Oddity)


@pytest.mark.parametrize("strict_order", [False, True])
@pytest.mark.parametrize(("made", "words"), KEYS.values(), ids=[*KEYS])
def test_a_key_that_cannot_be_known_again_is_refused(
    odd: Any, made: Any, words: str, strict_order: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By name, and before any handler: it would always be stale, or a bare ``TypeError``."""
    odd.objects.bulk_create([odd(code=str(number)) for number in range(3)])
    monkeypatch.setattr(Odd, "made", made)
    calls: list[Any] = []
    run = batch_processor(
        pending=odd.objects.filter(sent=False), done={"sent": True}, strict_order=strict_order
    )(lambda row: calls.append(row.pk))
    with pytest.raises(InvalidPending, match=rf"Oddity: expected hashable primary keys .* {words}"):
        run()
    assert calls == []
    assert odd.objects.filter(sent=False).count() == 3


@pytest.mark.parametrize("make", [the.at_most_once, the.at_least_once, None])
@pytest.mark.parametrize("size", [1, 3])
def test_a_row_that_its_handler_moves_to_another_key_has_failed(make: Any, size: int) -> None:
    """It would be processed under the one key, and pending under the other."""
    pks = [row.pk for row in the.errands(3)]

    def move(row: Errand) -> None:
        if row.place == 1:
            Errand.objects.filter(pk=row.pk).delete()
            row.pk = Errand.objects.create(pk=row.pk + 1000, place=row.place).pk

    if make is None:
        run: Any = batch_processor(pending=the.PENDING, done={"done": True}, batch_size=size)(move)
    else:
        run = make(move, batch_size=size)
    report = run(filter=models.Q(pk__in=pks))
    assert_run(report, processed=2, failed=1)
    [failure] = report.failures
    assert f"got row {pks[1]} with the key {pks[1] + 1000}" in str(failure.error)
    # The default delivery takes the row's work back.
    assert Errand.objects.filter(pk=pks[1]).exists() is (make is None)
