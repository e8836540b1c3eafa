"""Commands side by side, each of which tells how far it is."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

#: How pytest ends a line, and whatever else is to be shown.
_PERCENT = re.compile(r"\[ *(\d+)%\]$")
#: Percent between two lines of one command.
STEP = 10


@dataclass
class Progress:
    """What is printed while the commands run: a line for each start, step and end.

    Whole lines, on a terminal and through a pipe: those of several commands can be mixed.
    """

    names: Sequence[str]
    failed: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    _began: float = field(default_factory=time.monotonic)

    def line(self, name: str, said: str) -> None:
        """Print what a command has come to, and the minutes and seconds since the first start."""
        minutes, seconds = divmod(int(time.monotonic() - self._began), 60)
        width = max(map(len, self.names))
        print(f"{minutes:3}:{seconds:02}  {name:{width}}  {said}", flush=True)

    def ended(self, name: str, code: int, lines: Sequence[str]) -> None:
        """Print how a command ended."""
        last = next((line for line in reversed(lines) if " passed" in line), "").strip(" =\n")
        if code:
            self.failed.append(name)
        elif any(line.startswith("Left out: ") for line in lines):
            self.left_out.append(name)
            last = "left out"
        self.line(name, f"FAILED  {last}" if code else last or "passed")
        for line in lines if code else []:
            if line.startswith(("FAILED ", "ERROR ")):
                self.line(name, line.rstrip("\n"))


def side_by_side(commands: Mapping[str, Sequence[str]], most: int) -> int:
    """Run the commands by their names, so many at once; return 1 if one failed.

    What the failed ones have printed comes last, where it is looked for.
    """
    progress = Progress([*commands])
    printed: dict[str, list[str]] = {name: [] for name in commands}

    def run(name: str) -> None:
        progress.line(name, "started")
        shown = 0
        with subprocess.Popen(
            commands[name],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                printed[name].append(line)
                found = _PERCENT.search(line)
                percent = int(found[1]) if found else 0
                if shown + STEP <= percent < 100:  # the end has its own line
                    shown = percent - percent % STEP
                    progress.line(name, f"{percent} %")
        progress.ended(name, process.returncode, printed[name])

    with ThreadPoolExecutor(most) as pool:
        list(pool.map(run, commands))
    for name in progress.failed:
        print(f"\n=== output of {name}\n{''.join(printed[name])}", flush=True)
    print(f"\n=== {verdict(progress.failed, progress.left_out)}", flush=True)
    return 1 if progress.failed else 0


def verdict(failed: Sequence[str], left_out: Sequence[str]) -> str:
    """Return the last line of a run."""
    if failed:
        return f"failed: {', '.join(failed)}"
    return f"all is well{', without ' if left_out else ''}{', '.join(left_out)}"
