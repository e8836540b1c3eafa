"""The shapes, family by family, in the order of ``docs/howto/loops.md``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

from tests.ported.shapes.shape import Shape

AGO, LATER = timedelta(hours=-1), timedelta(hours=1)

#: The families, with the headings of the page.
FAMILIES = {
    "claims": "How a row is claimed",
    "results": "What is written",
    "retries": "When a row fails",
    "order": "Which rows, and in which order",
    "groups": "Rows that belong together",
    "calls": "Calls for many rows",
    "handed_out": "Rows that are handed out",
    "runs": "Workers, and the end of a run",
    "again": "Rows that come again",
    "chains": "Rows that depend on other rows",
}

GOOD: Mapping[str, Mapping[str, Any]] = {"a": {}, "b": {}}
FAILED = {"a": "done", "b": "done", "bad": "failed"}
KINDS: Mapping[str, Mapping[str, Any]] = {
    "a1": {"kind": "a"},
    "b1": {"kind": "b"},
    "a2": {"kind": "a"},
}
OWNED: Mapping[str, Mapping[str, Any]] = {
    "a": {"owner": "one", "amount": 1},
    "b": {"owner": "one", "amount": 2},
    "c": {"owner": "two", "amount": 5},
}
LEASED: Mapping[str, Mapping[str, Any]] = {
    "a": {},
    "held": {"leased_until": LATER},
    "lapsed": {"leased_until": AGO},
    "bad": {},
}


def all_done(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "done")


CLAIMS = [
    Shape("lock_each", "locks a row, works, writes a flag, commits"),
    Shape("lock_many", "locks a hundred rows, works, commits once"),
    Shape(
        "mark_running",
        "writes `running`, commits, works, writes `done`; old `running` rows are put back",
        rows={
            **GOOD,
            "bad": {},
            "old": {"state": "running", "started_at": AGO, "leased_until": AGO},
        },
        end={**FAILED, "old": "done"},
        calls=("a", "b", "old"),
    ),
    Shape(
        "mark_worker",
        "also writes the worker's name, and since when it works",
        shows="state started_at",
        end={name: f"{state} None" for name, state in FAILED.items()},
    ),
    Shape(
        "never_again",
        "writes `running`, commits, works; a row that stays `running` is for a person",
        end={**FAILED, "bad": "running"},
    ),
    Shape(
        "flag_first",
        "writes the flag, commits, works; what fails is lost",
        end=all_done("a", "b", "bad"),
    ),
    Shape(
        "lease",
        "writes the time until which the row is held, commits, works",
        rows=LEASED,
        end={"a": "done", "held": "new", "lapsed": "done", "bad": "new"},
        calls=("a", "lapsed"),
    ),
    Shape(
        "lease_in_due_at",
        "moves the time at which the row is due ahead, commits, works",
        rows={"a": {}, "due": {"due_at": AGO}, "later": {"due_at": LATER}, "bad": {}},
        end={"a": "done", "due": "done", "later": "new", "bad": "new"},
        calls=("a", "due"),
    ),
    Shape("delete_after_work", "locks a row, works, deletes it, commits", end={"bad": "new"}),
    Shape(
        "one_by_id",
        "gets the row's key in a message, and locks this row only",
        end={"a": "done", "b": "new", "bad": "new"},
        calls=("a",),
    ),
    Shape(
        "put_back",
        "a second job puts back rows that have been `running` for too long",
        rows={
            "a": {},
            "lost": {"state": "running", "started_at": AGO},
            "fresh": {"state": "running", "started_at": LATER},
        },
        end={"a": "done", "lost": "done", "fresh": "running"},
        calls=("a", "lost"),
    ),
    Shape(
        "unknown_after_death",
        "a row whose worker died gets the state `unknown`, and is not tried again",
        rows={name: values for name, values in LEASED.items() if name != "bad"},
        end={"a": "done", "held": "new", "lapsed": "unknown"},
        calls=("a",),
    ),
    Shape(
        "progress",
        "writes its progress while it works, for others to see",
        rows=GOOD,
        shows="state amount",
        end={"a": "done 100", "b": "done 100"},
        calls=("a 50", "a 100", "b 50", "b 100"),
    ),
]

RESULTS = [
    Shape(
        "stamp",
        "writes the time at which the row was done",
        shows="is_finished",
        end={"a": "True", "b": "True", "bad": "False"},
    ),
    Shape(
        "outcomes",
        "writes one of several states, which the work decides",
        end={"a": "A", "b": "B", "bad": "new"},
    ),
    Shape(
        "values",
        "writes what the work returned, with the state and the time",
        shows="state result is_finished",
        end={"a": "done A True", "b": "done B True", "bad": "new  False"},
    ),
    Shape(
        "error_text",
        "writes the text of an error, and a state for it",
        shows="state result",
        end={"a": "done", "b": "done", "bad": "failed bad"},
    ),
    Shape(
        "child_rows",
        "creates rows of another table",
        shows="state parts_made",
        end={"a": "done from work", "b": "done from work", "bad": "new"},
    ),
    Shape(
        "rollup",
        "adds the row to a total in another table, exactly once",
        rows=OWNED,
        shows="state balance",
        end={"a": "done 3", "b": "done 3", "c": "done 5"},
        calls=(),
    ),
    Shape(
        "own_method",
        "calls a method of the model, which changes the state",
        shows="state parts_made",
        end={"a": "done history", "b": "done history", "bad": "new"},
    ),
    Shape(
        "after_commit",
        "writes the state, and notifies when this is committed",
        rows=GOOD,
        end=all_done("a", "b"),
    ),
    Shape(
        "expire",
        "writes a state to all rows that are due, and does nothing else",
        rows={"a": {"due_at": AGO}, "b": {"due_at": LATER}, "c": {"due_at": AGO}},
        end={"a": "expired", "b": "new", "c": "expired"},
        calls=(),
    ),
]

RETRIES = [
    Shape("one_try", "writes `failed` at the first error", end=FAILED),
    Shape(
        "counted",
        "counts the attempts, and gives up after the third one",
        shows="state attempts",
        end={"a": "done 0", "b": "done 0", "bad": "failed 3"},
        rounds=4,
        workers=1,
    ),
    Shape(
        "backoff",
        "also waits longer after each attempt, and stores the error",
        shows="state attempts",
        end={"a": "done 0", "b": "done 0", "bad": "failed 3"},
        rounds=4,
    ),
    Shape(
        "every_hour",
        "tries again after an hour, however often, unless the error is final",
        rows={**GOOD, "bad": {}, "never bad": {}},
        end={"a": "done", "b": "done", "bad": "new", "never bad": "failed"},
        rounds=3,
    ),
    Shape(
        "own_limit",
        "has the most attempts of each row in a column",
        rows={"bad 1": {"allowed": 1}, "bad 2": {"allowed": 2}, "bad 9": {}, "a": {}},
        shows="state attempts",
        end={"bad 1": "failed 1", "bad 2": "failed 2", "bad 9": "new 3", "a": "done 0"},
        calls=("a",),
        rounds=3,
    ),
    Shape(
        "deferred",
        "writes `deferred` at an error, so that a page shows which rows wait",
        shows="state attempts",
        end={"a": "done 0", "b": "done 0", "bad": "deferred 2"},
        rounds=2,
    ),
    Shape(
        "permanent",
        "gives up at once after some errors, and tries again after others",
        rows={**GOOD, "bad": {}, "never bad": {}},
        shows="state attempts",
        end={"a": "done 0", "b": "done 0", "bad": "new 1", "never bad": "failed 1"},
    ),
    Shape(
        "not_yet",
        "puts a row off that cannot be handled yet; that is no attempt",
        rows={"a": {"amount": 1}, "early": {}},
        shows="state attempts",
        end={"a": "done 0", "early": "new 0"},
        calls=("a",),
    ),
    Shape(
        "to_the_end",
        "lowers the priority of a row that failed",
        rows={"bad": {"priority": 9}, "a": {"priority": 5}, "b": {"priority": 1}},
        shows="state priority",
        end={"bad": "new 8", "a": "done 5", "b": "done 1"},
        ordered=True,
        workers=1,
    ),
]

ORDER = [
    Shape(
        "priority",
        "takes the row with the highest priority first",
        rows={"c": {}, "a": {"priority": 9}, "bad": {"priority": 7}, "b": {"priority": 5}},
        end={"a": "done", "b": "done", "c": "done", "bad": "new"},
        calls=("a", "b", "c"),
        ordered=True,
        workers=1,
    ),
    Shape(
        "scheduled",
        "takes rows whose time has come",
        rows={"a": {"due_at": AGO}, "bad": {"due_at": AGO}, "b": {"due_at": LATER}},
        end={"a": "done", "bad": "new", "b": "new"},
        calls=("a",),
    ),
    Shape(
        "too_late",
        "gives up rows that have become too old, without the work",
        rows={"a": {"due_at": LATER}, "b": {"due_at": AGO}, "bad": {"due_at": LATER}},
        end={"a": "done", "b": "expired", "bad": "expired"},
        calls=("a",),
    ),
]

GROUPS = [
    Shape(
        "digest",
        "collects the rows of each user, and sends one message to each",
        rows=KINDS,
        end=all_done("a1", "a2", "b1"),
        calls=("a1+a2", "b1"),
    ),
    Shape(
        "over_parents",
        "locks a parent that has new rows, and handles them together",
        rows=OWNED,
        end=all_done("a", "b", "c"),
        calls=("a+b", "c"),
    ),
    Shape(
        "in_order",
        "keeps the order of each chat; a row that failed holds the next ones",
        rows={"a bad": {"kind": "a"}, "a2": {"kind": "a"}, "b1": {"kind": "b"}},
        end={"a bad": "failed", "a2": "done", "b1": "done"},
        calls=("b1", "a2"),
        ordered=True,
        rounds=3,
    ),
    Shape(
        "one_at_a_time",
        "never handles two rows of one account at the same time",
        rows={**KINDS, "bad": {"kind": "b"}},
        end={**all_done("a1", "a2", "b1"), "bad": "new"},
        calls=("a1", "a2", "b1"),
        rounds=3,
    ),
    Shape(
        "capped",
        "has no more than two rows of one tenant in flight",
        rows={**KINDS, "a3": {"kind": "a"}, "bad": {"kind": "b"}},
        end={**all_done("a1", "a2", "a3", "b1"), "bad": "new"},
        calls=("a1", "a2", "a3", "b1"),
        rounds=3,
    ),
    Shape(
        "state_of_parent",
        "leaves rows alone whose parent is paused or closed",
        rows={"a": {"owner": "open"}, "b": {"owner": "closed"}, "bad": {"owner": "open"}},
        end={"a": "done", "b": "new", "bad": "new"},
        calls=("a",),
    ),
    Shape(
        "in_turn",
        "takes a few rows of each tenant in turn",
        rows=OWNED,
        end={"a": "done", "b": "new", "c": "done"},
        calls=("a", "c"),
        workers=1,
    ),
]

CALLS = [
    Shape(
        "bulk_call",
        "sends a hundred rows in one call; if it fails, each alone",
        calls=("a", "b"),
        workers=1,
    ),
    Shape(
        "bulk_results",
        "sends a hundred rows in one call outside a transaction, which answers for each",
        end={"a": "done", "b": "done", "bad": "refused"},
        calls=("a+b+bad",),
        workers=1,
    ),
    Shape(
        "bulk_values",
        "computes values for a hundred rows, and writes them together",
        rows=GOOD,
        shows="state result",
        end={"a": "done A", "b": "done B"},
    ),
    Shape(
        "bulk_children",
        "creates the child rows of a hundred rows by one INSERT",
        rows=GOOD,
        shows="state parts_made",
        end={"a": "done from work", "b": "done from work"},
        calls=(),
    ),
    Shape(
        "one_connection",
        "opens a connection once, for all rows",
        calls=("a connection", "b connection"),
    ),
    Shape("threads", "works in several threads"),
    Shape("coroutines", "works in an event loop, many rows at once"),
]

HANDED_OUT = [
    Shape(
        "poll",
        "a view hands a row to an agent with a token, another one stores the result",
        rows=GOOD,
        shows="state result",
        end={"a": "done A", "b": "done B"},
    ),
    Shape(
        "next_for_a_person",
        "a person takes the next row that is not her own, for as long as she needs",
        rows={"own": {"worker": "anna"}, "a": {}, "b": {}},
        shows="state result",
        end={"own": "new", "a": "done yes", "b": "new"},
        calls=(),
        workers=1,
    ),
]

RUNS = [
    Shape(
        "most_rows",
        "handles so many rows, and ends",
        rows={**GOOD, "c": {}},
        end={"a": "done", "b": "done", "c": "new"},
        workers=1,
    ),
    Shape("time_box", "ends when its time is up"),
    Shape(
        "stop_after_failures",
        "ends when several rows fail one after the other",
        rows={"a": {}, "bad": {}, "bad 2": {}, "b": {}},
        end={"a": "done", "bad": "new", "bad 2": "new", "b": "new"},
        calls=("a",),
        workers=1,
    ),
    Shape("one_worker", "holds a lock while it runs, so that one worker is at work"),
    Shape("two_workers", "lets so many workers be at work, on all machines together", workers=3),
]

AGAIN = [
    Shape(
        "next_time",
        "writes the time at which the row is due next",
        rows={"a": {"due_at": AGO}, "b": {"due_at": LATER}, "bad": {"due_at": AGO}},
        shows="is_due",
        end={"a": "False", "b": "False", "bad": "True"},
        calls=("a",),
    ),
    Shape(
        "each_run",
        "handles all rows in each run, and changes none",
        rounds=2,
        calls=("a", "a", "b", "b"),
        end={"a": "new", "b": "new", "bad": "new"},
        workers=1,
    ),
    Shape(
        "longest_ago",
        "handles the rows that were not handled for longest, some in each run",
        rows={"a": {}, "b": {}, "c": {}, "d": {}},
        shows="amount",
        end={"a": "2", "b": "2", "c": "1", "d": "1"},
        calls=("a", "b", "c", "d", "a", "b"),
        ordered=True,
        rounds=3,
        workers=1,
    ),
    Shape(
        "steps",
        "does one step of a row in each run, and remembers how far it came",
        rows=GOOD,
        shows="amount",
        end={"a": "3", "b": "3"},
        calls=("a 0", "a 1", "a 2", "b 0", "b 1", "b 2"),
        rounds=4,
        workers=1,
    ),
    Shape(
        "too_old",
        "refreshes rows whose last result is too old",
        rows={
            "a": {"finished_at": -timedelta(days=31)},
            "b": {"finished_at": AGO},
            "c": {},
            "bad": {},
        },
        shows="is_finished",
        end={"a": "True", "b": "True", "c": "True", "bad": "False"},
        calls=("a", "c"),
    ),
    Shape(
        "changed_again",
        "handles a row again that has changed while it was handled",
        rows={"a": {"priority": 1}, "moves": {"priority": 1}, "b": {}, "bad": {"priority": 1}},
        shows="amount priority",
        end={"a": "1 1", "moves": "2 2", "b": "0 0", "bad": "0 1"},
        calls=("a", "moves", "moves"),
        rounds=2,
    ),
]

CHAINS = [
    Shape(
        "stages",
        "one stage's last state is the next stage's first",
        rows=GOOD,
        end={"a": "sent", "b": "sent"},
        calls=("pack a", "pack b", "send a", "send b"),
        rounds=2,
    ),
    Shape(
        "depends",
        "waits for the row that it depends on",
        rows={"a": {}, "b": {"parent": "a"}, "bad": {}, "c": {"parent": "bad"}},
        end={"a": "done", "b": "done", "bad": "new", "c": "new"},
        rounds=2,
    ),
    Shape(
        "after_all_children",
        "handles a row when all its children are done",
        rows={
            "a": {"state": "waiting"},
            "b": {"state": "waiting"},
            "a1": {"state": "done", "parent": "a"},
            "b1": {"state": "done", "parent": "b"},
            "b2": {"parent": "b"},
        },
        end={"a": "complete", "b": "waiting", "a1": "done", "b1": "done", "b2": "new"},
        calls=("a",),
    ),
    Shape(
        "bury",
        "moves failed rows to a table of dead letters",
        rows={"a": {}, "b": {"state": "failed"}},
        end={"a": "new"},
        calls=(),
        buried=("b",),
    ),
    Shape(
        "lock_related",
        "locks a related row as well, and waits for it",
        rows=OWNED,
        shows="state balance",
        end={"a": "done 3", "b": "done 3", "c": "done 5"},
        calls=(),
    ),
    Shape(
        "related_is_busy",
        "puts a row off whose related row is locked",
        rows=OWNED,
        shows="state balance",
        end={"a": "done 3", "b": "done 3", "c": "done 5"},
        calls=(),
        rounds=3,
    ),
]

OF_FAMILIES = {
    "claims": CLAIMS,
    "results": RESULTS,
    "retries": RETRIES,
    "order": ORDER,
    "groups": GROUPS,
    "calls": CALLS,
    "handed_out": HANDED_OUT,
    "runs": RUNS,
    "again": AGAIN,
    "chains": CHAINS,
}
SHAPES = [
    replace(shape, family=family) for family, shapes in OF_FAMILIES.items() for shape in shapes
]
