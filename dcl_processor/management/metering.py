"""What ``processors run`` shows outside: its metrics, and whether its workers are alive."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from django.core.management.base import CommandError, CommandParser

from dcl_processor import observers
from dcl_processor.masking import described
from dcl_processor.processes.graceful_stop import Stop
from dcl_processor.processes.health import Health
from dcl_processor.processes.visible import Notifier

from .command_line import USAGE_ERROR

if TYPE_CHECKING:
    from dcl_processor.contrib.prometheus.exposition import Counts
    from dcl_processor.processes.pool import OnCounts

logger = logging.getLogger("dcl_processor.operations")

#: The address that is listened on unless another is given: metrics are for this machine.
ADDRESS = "127.0.0.1"

#: Seconds between two writes of the file.
INTERVAL = 5.0


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
        "--metrics-file",
        type=Path,
        metavar="FILE",
        help="Add the metrics to this file, for node_exporter's textfile collector.",
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

    Raises ``CommandError`` if the port or the file cannot be had. Yields ``None`` without options.
    """
    port, path = options["metrics_port"], options["metrics_file"]
    if port is None and path is None:
        yield None
        return
    refuse_without_client("--metrics-port and --metrics-file")
    from dcl_processor.contrib.prometheus.exposition import Counts  # an extra

    counts = Counts(names)
    with ExitStack() as stack:
        if port is not None:
            stack.callback(_served(counts, *port))
        if path is not None:
            stack.enter_context(_written(counts, path))
        observers.add(counts)
        stack.callback(observers.remove, counts)
        yield counts.add


def refuse_without_client(option: str) -> None:
    """Raise ``CommandError`` if the client of Prometheus is not installed."""
    try:
        import prometheus_client  # noqa: F401  # an extra
    except ImportError as error:
        raise CommandError(
            f"expected the package prometheus-client for {option}, got none; install "
            "dcl-processor[prometheus].",
            returncode=USAGE_ERROR,
        ) from error


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


@contextmanager
def _written(counts: Counts, path: Path) -> Iterator[None]:
    """Write the counts to the file from time to time, and at the end.

    In a thread: another command may have the lock of the file, and may be stopped. A file that
    cannot be written is reported once, and ends no run.
    """
    from dcl_processor.contrib.prometheus.exposition import add_to_file  # an extra
    from dcl_processor.metrics import handing_over, repeated

    write = handing_over(counts.samples, partial(add_to_file, path))
    is_broken = False

    def write_or_warn() -> None:
        nonlocal is_broken
        try:
            if write():
                is_broken = False
        except OSError as error:
            if not is_broken:
                logger.warning("the metrics could not be written: %s", described(error))
            is_broken = True

    try:
        write()
    except TimeoutError:
        pass  # the next try reports it
    except (OSError, ValueError) as error:  # the latter of a path without a name
        raise unwritable("--metrics-file", path, error) from error
    try:
        with repeated(write_or_warn, INTERVAL):
            yield
    finally:
        write_or_warn()


def unwritable(option: str, path: Path | None, error: Exception) -> CommandError:
    """Return the error of the command for a file that cannot be written."""
    return CommandError(
        f"expected {option} to name a file that can be written, got {path}: "
        f"{described(error)}; create its folder, or choose another.",
        returncode=USAGE_ERROR,
    )


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
        raise unwritable("--health-file", path, error) from error
    try:
        yield health
    finally:
        health.close()
