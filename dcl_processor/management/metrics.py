"""``processors metrics``: what only the database knows, as metrics for Prometheus."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from django.core.management.base import CommandError, CommandParser

from dcl_processor import registry

from .choosing import NOT_FOUND_OUT, USAGE_ERROR, choose, time_limit
from .metering import refuse_without_client, unwritable
from .output import Output

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prometheus_client.core import Metric

HELP = "Read what waits and what is stuck from the database, as metrics for Prometheus."


def add_arguments(parser: CommandParser) -> None:
    """Add the action's own options."""
    parser.add_argument("names", nargs="*", metavar="NAME", help="Processors; default: all.")
    parser.add_argument(
        "--metrics-file",
        type=Path,
        metavar="FILE",
        help="Write to this file, for node_exporter's textfile collector, and not to stdout.",
    )
    parser.add_argument(
        "--timeout",
        type=time_limit,
        metavar="SECONDS",
        help="Seconds that each question to the database may take (default: 5).",
    )


def handle(output: Output, options: dict[str, Any]) -> None:
    """Write the metrics; raise ``CommandError`` if one is absent that should be there."""
    refuse_without_client("processors metrics")
    from dcl_processor.contrib.prometheus import exposition, gauges  # an extra
    from dcl_processor.insights.status import TIMEOUT

    names, seconds = options["names"], options["timeout"]
    chosen = choose(names, run_all=not names, left_out=NOT_FOUND_OUT)
    left_out = [] if names else registry.broken()
    output.left_out(left_out)
    found = gauges.read(
        chosen, using=options["using"], seconds=TIMEOUT if seconds is None else seconds
    )
    metrics = list(gauges.gauges(found))
    path: Path | None = options["metrics_file"]
    if path is None:
        output.answer(_document(metrics), [exposition.text(metrics)])
    else:
        try:
            exposition.write(path, metrics)
        except OSError as error:
            raise CommandError(unwritable(path, error), returncode=USAGE_ERROR) from error
    unknown = [
        f"{each.name}: {name} could not be found out: {answer.why}"
        for each in found
        for name, answer in each.answers.items()
        if answer.how == "unknown"
    ]
    unknown += [f"{each.app}: its processors cannot be imported" for each in left_out]
    if unknown:
        raise CommandError("; ".join(unknown) + ".", returncode=NOT_FOUND_OUT)


def _document(metrics: Sequence[Metric]) -> list[dict[str, Any]]:
    return [
        {"name": sample.name, "labels": sample.labels, "value": sample.value}
        for metric in metrics
        for sample in metric.samples
    ]
