"""The shapes, family by family, in the order of ``docs/howto/loops.md``."""

from __future__ import annotations

from collections.abc import Mapping
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
    Shape(
        family="claims",
        name="lock_each",
        loop="locks a row, works, writes a flag, commits",
    ),
    Shape(
        family="claims",
        name="lock_many",
        loop="locks a hundred rows, works, commits once",
    ),
    Shape(
        family="claims",
        name="mark_running",
        loop="writes `running`, commits, works, writes `done`; old `running` rows are put back",
        rows={
            **GOOD,
            "bad": {},
            "old": {"state": "running", "started_at": AGO, "leased_until": AGO},
        },
        end={**FAILED, "old": "done"},
        calls=("a", "b", "old"),
    ),
    Shape(
        family="claims",
        name="mark_worker",
        loop="also writes the worker's name, and since when it works",
        shows="state started_at",
        end={name: f"{state} None" for name, state in FAILED.items()},
    ),
    Shape(
        family="claims",
        name="never_again",
        loop="writes `running`, commits, works; a row that stays `running` is for a person",
        end={**FAILED, "bad": "running"},
    ),
    Shape(
        family="claims",
        name="flag_first",
        loop="writes the flag, commits, works; what fails is lost",
        end=all_done("a", "b", "bad"),
    ),
    Shape(
        family="claims",
        name="lease",
        loop="writes the time until which the row is held, commits, works",
        rows=LEASED,
        end={"a": "done", "held": "new", "lapsed": "done", "bad": "new"},
        calls=("a", "lapsed"),
    ),
    Shape(
        family="claims",
        name="lease_in_due_at",
        loop="moves the time at which the row is due ahead, commits, works",
        rows={"a": {}, "due": {"due_at": AGO}, "later": {"due_at": LATER}, "bad": {}},
        end={"a": "done", "due": "done", "later": "new", "bad": "new"},
        calls=("a", "due"),
    ),
    Shape(
        family="claims",
        name="delete_after_work",
        loop="locks a row, works, deletes it, commits",
        end={"bad": "new"},
    ),
    Shape(
        family="claims",
        name="one_by_id",
        loop="gets the row's key in a message, and locks this row only",
        end={"a": "done", "b": "new", "bad": "new"},
        calls=("a",),
    ),
    Shape(
        family="claims",
        name="put_back",
        loop="a second job puts back rows that have been `running` for too long",
        rows={
            "a": {},
            "lost": {"state": "running", "started_at": AGO},
            "fresh": {"state": "running", "started_at": LATER},
        },
        end={"a": "done", "lost": "done", "fresh": "running"},
        calls=("a", "lost"),
    ),
    Shape(
        family="claims",
        name="unknown_after_death",
        loop="a row whose worker died gets the state `unknown`, and is not tried again",
        rows={name: values for name, values in LEASED.items() if name != "bad"},
        end={"a": "done", "held": "new", "lapsed": "unknown"},
        calls=("a",),
    ),
    Shape(
        family="claims",
        name="progress",
        loop="writes its progress while it works, for others to see",
        rows=GOOD,
        shows="state amount",
        end={"a": "done 100", "b": "done 100"},
        calls=("a 50", "a 100", "b 50", "b 100"),
    ),
]

RESULTS = [
    Shape(
        family="results",
        name="stamp",
        loop="writes the time at which the row was done",
        shows="is_finished",
        end={"a": "True", "b": "True", "bad": "False"},
    ),
    Shape(
        family="results",
        name="outcomes",
        loop="writes one of several states, which the work decides",
        end={"a": "A", "b": "B", "bad": "new"},
    ),
    Shape(
        family="results",
        name="values",
        loop="writes what the work returned, with the state and the time",
        shows="state result is_finished",
        end={"a": "done A True", "b": "done B True", "bad": "new  False"},
    ),
    Shape(
        family="results",
        name="error_text",
        loop="writes the text of an error, and a state for it",
        shows="state result",
        end={"a": "done", "b": "done", "bad": "failed bad"},
    ),
    Shape(
        family="results",
        name="child_rows",
        loop="creates rows of another table",
        shows="state parts_made",
        end={"a": "done from work", "b": "done from work", "bad": "new"},
    ),
    Shape(
        family="results",
        name="rollup",
        loop="adds the row to a total in another table, exactly once",
        rows=OWNED,
        shows="state balance",
        end={"a": "done 3", "b": "done 3", "c": "done 5"},
        calls=(),
    ),
    Shape(
        family="results",
        name="own_method",
        loop="calls a method of the model, which changes the state",
        shows="state parts_made",
        end={"a": "done history", "b": "done history", "bad": "new"},
    ),
    Shape(
        family="results",
        name="after_commit",
        loop="writes the state, and notifies when this is committed",
        rows=GOOD,
        end=all_done("a", "b"),
    ),
    Shape(
        family="results",
        name="expire",
        loop="writes a state to all rows that are due, and does nothing else",
        rows={"a": {"due_at": AGO}, "b": {"due_at": LATER}, "c": {"due_at": AGO}},
        end={"a": "expired", "b": "new", "c": "expired"},
        calls=(),
    ),
]

RETRIES = [
    Shape(
        family="retries",
        name="one_try",
        loop="writes `failed` at the first error",
        end=FAILED,
    ),
    Shape(
        family="retries",
        name="counted",
        loop="counts the attempts, and gives up after the third one",
        shows="state attempts",
        end={"a": "done 0", "b": "done 0", "bad": "failed 3"},
        rounds=4,
        workers=1,
    ),
    Shape(
        family="retries",
        name="backoff",
        loop="also waits longer after each attempt, and stores the error",
        shows="state attempts",
        end={"a": "done 0", "b": "done 0", "bad": "failed 3"},
        rounds=4,
    ),
    Shape(
        family="retries",
        name="every_hour",
        loop="tries again after an hour, however often, unless the error is final",
        rows={**GOOD, "bad": {}, "never bad": {}},
        end={"a": "done", "b": "done", "bad": "new", "never bad": "failed"},
        rounds=3,
    ),
    Shape(
        family="retries",
        name="own_limit",
        loop="has the most attempts of each row in a column",
        rows={"bad 1": {"allowed": 1}, "bad 2": {"allowed": 2}, "bad 9": {}, "a": {}},
        shows="state attempts",
        end={"bad 1": "failed 1", "bad 2": "failed 2", "bad 9": "new 3", "a": "done 0"},
        calls=("a",),
        rounds=3,
    ),
    Shape(
        family="retries",
        name="deferred",
        loop="writes `deferred` at an error, so that a page shows which rows wait",
        shows="state attempts",
        end={"a": "done 0", "b": "done 0", "bad": "deferred 2"},
        rounds=2,
    ),
    Shape(
        family="retries",
        name="permanent",
        loop="gives up at once after some errors, and tries again after others",
        rows={**GOOD, "bad": {}, "never bad": {}},
        shows="state attempts",
        end={"a": "done 0", "b": "done 0", "bad": "new 1", "never bad": "failed 1"},
    ),
    Shape(
        family="retries",
        name="not_yet",
        loop="puts a row off that cannot be handled yet; that is no attempt",
        rows={"a": {"amount": 1}, "early": {}},
        shows="state attempts",
        end={"a": "done 0", "early": "new 0"},
        calls=("a",),
    ),
    Shape(
        family="retries",
        name="to_the_end",
        loop="lowers the priority of a row that failed",
        rows={"bad": {"priority": 9}, "a": {"priority": 5}, "b": {"priority": 1}},
        shows="state priority",
        end={"bad": "new 8", "a": "done 5", "b": "done 1"},
        ordered=True,
        workers=1,
    ),
]

ORDER = [
    Shape(
        family="order",
        name="priority",
        loop="takes the row with the highest priority first",
        rows={"c": {}, "a": {"priority": 9}, "bad": {"priority": 7}, "b": {"priority": 5}},
        end={"a": "done", "b": "done", "c": "done", "bad": "new"},
        calls=("a", "b", "c"),
        ordered=True,
        workers=1,
    ),
    Shape(
        family="order",
        name="scheduled",
        loop="takes rows whose time has come",
        rows={"a": {"due_at": AGO}, "bad": {"due_at": AGO}, "b": {"due_at": LATER}},
        end={"a": "done", "bad": "new", "b": "new"},
        calls=("a",),
    ),
    Shape(
        family="order",
        name="too_late",
        loop="gives up rows that have become too old, without the work",
        rows={"a": {"due_at": LATER}, "b": {"due_at": AGO}, "bad": {"due_at": LATER}},
        end={"a": "done", "b": "expired", "bad": "expired"},
        calls=("a",),
    ),
]

GROUPS = [
    Shape(
        family="groups",
        name="digest",
        loop="collects the rows of each user, and sends one message to each",
        rows=KINDS,
        end=all_done("a1", "a2", "b1"),
        calls=("a1+a2", "b1"),
    ),
    Shape(
        family="groups",
        name="over_parents",
        loop="locks a parent that has new rows, and handles them together",
        rows=OWNED,
        end=all_done("a", "b", "c"),
        calls=("a+b", "c"),
    ),
    Shape(
        family="groups",
        name="in_order",
        loop="keeps the order of each chat; a row that failed holds the next ones",
        rows={"a bad": {"kind": "a"}, "a2": {"kind": "a"}, "b1": {"kind": "b"}},
        end={"a bad": "failed", "a2": "done", "b1": "done"},
        calls=("b1", "a2"),
        ordered=True,
        rounds=3,
    ),
    Shape(
        family="groups",
        name="one_at_a_time",
        loop="never handles two rows of one account at the same time",
        rows={**KINDS, "bad": {"kind": "b"}},
        end={**all_done("a1", "a2", "b1"), "bad": "new"},
        calls=("a1", "a2", "b1"),
        rounds=3,
    ),
    Shape(
        family="groups",
        name="capped",
        loop="has no more than two rows of one tenant in flight",
        rows={**KINDS, "a3": {"kind": "a"}, "bad": {"kind": "b"}},
        end={**all_done("a1", "a2", "a3", "b1"), "bad": "new"},
        calls=("a1", "a2", "a3", "b1"),
        rounds=3,
    ),
    Shape(
        family="groups",
        name="state_of_parent",
        loop="leaves rows alone whose parent is paused or closed",
        rows={"a": {"owner": "open"}, "b": {"owner": "closed"}, "bad": {"owner": "open"}},
        end={"a": "done", "b": "new", "bad": "new"},
        calls=("a",),
    ),
    Shape(
        family="groups",
        name="in_turn",
        loop="takes a few rows of each tenant in turn",
        rows=OWNED,
        end={"a": "done", "b": "new", "c": "done"},
        calls=("a", "c"),
        workers=1,
    ),
]

CALLS = [
    Shape(
        family="calls",
        name="bulk_call",
        loop="sends a hundred rows in one call; if it fails, each alone",
        calls=("a", "b"),
        workers=1,
    ),
    Shape(
        family="calls",
        name="bulk_results",
        loop="sends a hundred rows in one call outside a transaction, which answers for each",
        end={"a": "done", "b": "done", "bad": "refused"},
        calls=("a+b+bad",),
        workers=1,
    ),
    Shape(
        family="calls",
        name="bulk_values",
        loop="computes values for a hundred rows, and writes them together",
        rows=GOOD,
        shows="state result",
        end={"a": "done A", "b": "done B"},
    ),
    Shape(
        family="calls",
        name="bulk_children",
        loop="creates the child rows of a hundred rows by one INSERT",
        rows=GOOD,
        shows="state parts_made",
        end={"a": "done from work", "b": "done from work"},
        calls=(),
    ),
    Shape(
        family="calls",
        name="one_connection",
        loop="opens a connection once, for all rows",
        calls=("a connection", "b connection"),
    ),
    Shape(
        family="calls",
        name="threads",
        loop="works in several threads",
    ),
    Shape(
        family="calls",
        name="coroutines",
        loop="works in an event loop, many rows at once",
    ),
]

HANDED_OUT = [
    Shape(
        family="handed_out",
        name="poll",
        loop="a view hands a row to an agent with a token, another one stores the result",
        rows=GOOD,
        shows="state result",
        end={"a": "done A", "b": "done B"},
    ),
    Shape(
        family="handed_out",
        name="next_for_a_person",
        loop="a person takes the next row that is not her own, for as long as she needs",
        rows={"own": {"worker": "anna"}, "a": {}, "b": {}},
        shows="state result",
        end={"own": "new", "a": "done yes", "b": "new"},
        calls=(),
        workers=1,
    ),
]

RUNS = [
    Shape(
        family="runs",
        name="most_rows",
        loop="handles so many rows, and ends",
        rows={**GOOD, "c": {}},
        end={"a": "done", "b": "done", "c": "new"},
        workers=1,
    ),
    Shape(family="runs", name="time_box", loop="ends when its time is up"),
    Shape(
        family="runs",
        name="stop_after_failures",
        loop="ends when several rows fail one after the other",
        rows={"a": {}, "bad": {}, "bad 2": {}, "b": {}},
        end={"a": "done", "bad": "new", "bad 2": "new", "b": "new"},
        calls=("a",),
        workers=1,
    ),
    Shape(
        family="runs",
        name="one_worker",
        loop="holds a lock while it runs, so that one worker is at work",
    ),
    Shape(
        family="runs",
        name="two_workers",
        loop="lets so many workers be at work, on all machines together",
        workers=3,
    ),
]

AGAIN = [
    Shape(
        family="again",
        name="next_time",
        loop="writes the time at which the row is due next",
        rows={"a": {"due_at": AGO}, "b": {"due_at": LATER}, "bad": {"due_at": AGO}},
        shows="is_due",
        end={"a": "False", "b": "False", "bad": "True"},
        calls=("a",),
    ),
    Shape(
        family="again",
        name="each_run",
        loop="handles all rows in each run, and changes none",
        rounds=2,
        calls=("a", "a", "b", "b"),
        end={"a": "new", "b": "new", "bad": "new"},
        workers=1,
    ),
    Shape(
        family="again",
        name="longest_ago",
        loop="handles the rows that were not handled for longest, some in each run",
        rows={"a": {}, "b": {}, "c": {}, "d": {}},
        shows="amount",
        end={"a": "2", "b": "2", "c": "1", "d": "1"},
        calls=("a", "b", "c", "d", "a", "b"),
        ordered=True,
        rounds=3,
        workers=1,
    ),
    Shape(
        family="again",
        name="steps",
        loop="does one step of a row in each run, and remembers how far it came",
        rows=GOOD,
        shows="amount",
        end={"a": "3", "b": "3"},
        calls=("a 0", "a 1", "a 2", "b 0", "b 1", "b 2"),
        rounds=4,
        workers=1,
    ),
    Shape(
        family="again",
        name="too_old",
        loop="refreshes rows whose last result is too old",
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
        family="again",
        name="changed_again",
        loop="handles a row again that has changed while it was handled",
        rows={"a": {"priority": 1}, "moves": {"priority": 1}, "b": {}, "bad": {"priority": 1}},
        shows="amount priority",
        end={"a": "1 1", "moves": "2 2", "b": "0 0", "bad": "0 1"},
        calls=("a", "moves", "moves"),
        rounds=2,
    ),
]

CHAINS = [
    Shape(
        family="chains",
        name="stages",
        loop="one stage's last state is the next stage's first",
        rows=GOOD,
        end={"a": "sent", "b": "sent"},
        calls=("pack a", "pack b", "send a", "send b"),
        rounds=2,
    ),
    Shape(
        family="chains",
        name="depends",
        loop="waits for the row that it depends on",
        rows={"a": {}, "b": {"parent": "a"}, "bad": {}, "c": {"parent": "bad"}},
        end={"a": "done", "b": "done", "bad": "new", "c": "new"},
        rounds=2,
    ),
    Shape(
        family="chains",
        name="after_all_children",
        loop="handles a row when all its children are done",
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
        family="chains",
        name="bury",
        loop="moves failed rows to a table of dead letters",
        rows={"a": {}, "b": {"state": "failed"}},
        end={"a": "new"},
        calls=(),
        buried=("b",),
    ),
    Shape(
        family="chains",
        name="lock_related",
        loop="locks a related row as well, and waits for it",
        rows=OWNED,
        shows="state balance",
        end={"a": "done 3", "b": "done 3", "c": "done 5"},
        calls=(),
    ),
    Shape(
        family="chains",
        name="related_is_busy",
        loop="puts a row off whose related row is locked",
        rows=OWNED,
        shows="state balance",
        end={"a": "done 3", "b": "done 3", "c": "done 5"},
        calls=(),
        rounds=3,
    ),
]

SHAPES = [
    *CLAIMS,
    *RESULTS,
    *RETRIES,
    *ORDER,
    *GROUPS,
    *CALLS,
    *HANDED_OUT,
    *RUNS,
    *AGAIN,
    *CHAINS,
]
