"""What is printed of a run: a line when a stage starts and ends, and in the end what failed."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests import machine
from tests.failures import Failure
from tests.shares import selected_by

#: What is read of a log is its end.
MOST_LINES = 80
WIDTH = 240


class Progress:
    """A line for each start and end, with minutes and seconds since the run began."""

    def __init__(self, began: float, names: Sequence[str]) -> None:
        self._began = began
        self._width = max(map(len, names), default=0)
        self._starts: dict[str, float] = {}
        self._lock = threading.Lock()

    def line(self, name: str, said: str) -> None:
        """Print one whole line: those of several stages mix."""
        minutes, seconds = divmod(int(time.monotonic() - self._began), 60)
        with self._lock:
            print(f"{minutes:3}:{seconds:02}  {name:{self._width}}  {said}", flush=True)

    def started(self, name: str) -> None:
        self._starts[name] = time.monotonic()
        self.line(name, "started")

    def ended(self, name: str, said: str, budget: float, failed: Sequence[Failure]) -> None:
        """Print what a stage came to, and its time beside its budget."""
        took = time.monotonic() - self._starts[name]
        said = said or ("" if failed else "passed")
        self.line(name, f"{'FAILED  ' * bool(failed)}{said}; {took:.0f} s of {budget:.0f}")
        for each in failed:
            self.line(name, f"{'LATE' if each.late else 'FAILED'} {each.test}")


@dataclass
class Report:
    """What failed in a run, by stage, and what became of it."""

    factor: float
    failed: list[tuple[str, Failure]] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    def add(self, stage: str, failed: Sequence[Failure]) -> None:
        """Take down what failed in a stage."""
        self.failed += [(stage, each) for each in failed]

    def repeated(self, stage: str, failure: Failure, again: Sequence[Failure]) -> None:
        """Take down how a test that was late ended when it was repeated alone."""
        self.late.append(f"LATE {stage}: {failure.test}: {_first_line(failure.error)}")
        self.failed.remove((stage, failure))
        self.failed += [(stage, each) for each in again]

    def is_red(self) -> bool:
        """Say whether something failed, or was left out although CI leaves nothing out."""
        return bool(self.failed) or (bool(self.left_out) and os.environ.get("CI") == "true")

    def print(self, folder: Path) -> None:
        """Print what one has to read, in at most 80 lines; all of it goes to a file."""
        lines = [line for each in self.failed for line in _described(*each)]
        (folder / "failures.txt").write_text("\n".join(lines) + "\n")
        end = [
            *(f"Left out: {name}, because {why}." for name, why in self.left_out.items()),
            *self.late,
            machine.described(self.factor),
            self._verdict(),
        ]
        room = MOST_LINES - len(end) - 2
        if len(lines) > room:
            names = [f"FAILED {stage}: {each.test}" for stage, each in self.failed]
            lines = [*names[: room // 2], "", *lines][: room - 1]
            lines.append(f"… all {len(self.failed)} failures are in {folder / 'failures.txt'}")
        print("\n".join(["", *lines, "", *end]), flush=True)

    def _verdict(self) -> str:
        again = f"again: SHARE={selected_by()}"
        if self.failed:
            if all(failure.late for _, failure in self.failed):
                return f"=== RED: {len(self.failed)} waits ran out: machine or deadlock; {again}"
            stages = ", ".join(dict.fromkeys(stage for stage, _ in self.failed))
            return f"=== RED: {len(self.failed)} failed in {stages}; {again}"
        if self.is_red():
            return f"=== RED: left out: {', '.join(self.left_out)}"
        without = f", without {', '.join(self.left_out)}" if self.left_out else ""
        late = f", {len(self.late)} were late and passed three times alone" if self.late else ""
        return f"=== GREEN{without}{late}"


def _described(stage: str, failure: Failure) -> list[str]:
    return [
        f"FAILED {stage}: {failure.test}",
        *([f"    {failure.where}"[:WIDTH]] if failure.where else []),
        *(f"    {line}"[:WIDTH] for line in failure.error.splitlines()[:4]),
        *(f"    | {line}"[:WIDTH] for line in failure.log),
        f"    again: .venv/bin/python -m tests.suite '{stage}' '{failure.test}'",
    ]


def _first_line(text: str) -> str:
    return text.splitlines()[0][:WIDTH] if text else ""
