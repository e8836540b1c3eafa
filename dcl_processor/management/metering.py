"""What ``processors run`` shows outside: its metrics, and whether its workers are alive."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from django.core.management.base import CommandError, CommandParser

from dcl_processor import observers
from dcl_processor.processes.graceful_stop import Stop
from dcl_processor.processes.health import Health
from dcl_processor.processes.visible import Notifier
from dcl_processor.report.errors import described

from .command_line import USAGE_ERROR

if TYPE_CHECKING:
    from dcl_processor.contrib.prometheus.exposition import Counts
    from dcl_processor.processes.pool import OnCounts

#: The address that is listened on unless another is given: metrics are for this machine.
ADDRESS = "127.0.0.1"


def add_arguments(parser: CommandParser) -> None:
    """Add the options."""
    parser.add_argument(
        "--metrics-port",
        type=address,
        metavar="[ADDRESS:]PORT",
        help="Serve metrics for Prometheus here while the command runs, those of its workers "
        f"included (address: {ADDRESS}).",
    )
    parser.add_argument(
        "--health-file",
        type=Path,
        metavar="PATH",
        help="Write this file again each second while all workers are alive; "
        "python -m dcl_processor.alive PATH looks at it.",
    )


@contextmanager
def exported(names: Sequence[str], options: dict[str, Any]) -> Iterator[OnCounts | None]:
    """Expose the metrics of these processors; yield what takes those of other processes.

    Raises ``CommandError`` if the port cannot be had. Yields ``None`` without the option.
    """
    if (port := options["metrics_port"]) is None:
        yield None
        return
    try:
        import prometheus_client  # noqa: F401  # an extra
    except ImportError as error:
        raise CommandError(
            "expected the package prometheus-client for --metrics-port, got none; install "
            "dcl-processor[prometheus].",
            returncode=USAGE_ERROR,
        ) from error
    from dcl_processor.contrib.prometheus.exposition import Counts  # as above

    counts = Counts(names)
    end = _served(counts, *port)
    observers.add(counts)
    try:
        yield counts.add
    finally:
        observers.remove(counts)
        end()


def _served(counts: Counts, host: str, port: int) -> Callable[[], None]:
    from dcl_processor.contrib.prometheus.exposition import serve  # an extra

    try:
        return serve(counts.samples, host, port)
    except (OSError, UnicodeError) as error:  # the latter of a name that no host can have
        raise CommandError(
            f"expected a free port for --metrics-port, got {host}:{port}: {described(error)}; "
            "choose another.",
            returncode=USAGE_ERROR,
        ) from error


def address(text: str) -> tuple[str, int]:
    """Return the address and the port; raise ``ArgumentTypeError`` for other text."""
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or not 1 <= int(port) <= 65_535:
        raise argparse.ArgumentTypeError(
            f"expected a port from 1 to 65535, perhaps after an address and a colon, got {text!r}"
        )
    return host.strip("[]") or ADDRESS, int(port)


# --- whether the workers are alive: for the health file, and for systemd


@contextmanager
def published(
    names: Sequence[str], stop: Stop, path: Path | None, *, owns_process: bool
) -> Iterator[Health]:
    """Show the health of this command in the block; at its end, remove the file.

    ``owns_process``: only then systemd's variables are for this command, and are removed.
    """
    notifier = Notifier.taken_from(os.environ) if owns_process else None
    file = None if path is None else path.absolute()
    health = Health(names, stop, file, notifier)
    try:
        health.ready()
    except OSError as error:
        raise CommandError(
            f"expected --health-file to name a file that can be written, got {path}: "
            f"{described(error)}; create its folder, or choose another.",
            returncode=USAGE_ERROR,
        ) from error
    try:
        yield health
    finally:
        health.close()
