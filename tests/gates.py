"""Gates, folders at which a handler waits until a test lets it go on."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import Any

from tests.waiting import until


def wait_at_gate() -> None:
    """Say that a handler is at work, and stay there until the gate is opened."""
    gc.collect()  # what an earlier run of this process was given
    # A handler is not meant to know whether its run is to stop after this row.
    stopping = sys.modules.get("dcl_processor.workers.stopping")  # by the command alone
    kind = stopping.Stop if stopping is not None else ()
    stops: list[Any] = [each for each in gc.get_objects() if issubclass(type(each), kind)]
    gate = Path(os.environ["GATE"])
    (gate / f"reached-{os.getpid()}").touch()

    def is_open() -> bool:
        if any(stop.is_set() for stop in stops):
            (gate / f"stopping-{os.getpid()}").touch()
        return (gate / "open").exists()

    until(is_open, "the gate to be opened")


def at_gate(gate: Path, mark: str = "reached", handlers: int = 1) -> list[int]:
    """Wait until so many handlers have left the mark at the gate; return their processes."""
    until(lambda: len(list(gate.glob(f"{mark}-*"))) == handlers, f"{handlers} × {mark}")
    return sorted(int(path.name.rpartition("-")[2]) for path in gate.glob(f"{mark}-*"))
