"""Metrics for Prometheus; the extra ``prometheus`` has its client.

Three sources, for three kinds of processes:

- ``processors run`` counts for itself and for the workers that it starts: ``--metrics-port`` and
  ``--metrics-file``.
- In a program that calls ``run()`` itself, such as a Celery worker or a web server, ``register()``
  adds the metrics to the program's registry; in the client's multi-process mode, too.
- The numbers that only the database knows: ``processors metrics``, and ``gauges_view()``.

The names and labels are in the documentation, and in the dashboard and the alert rules of the
folder ``monitoring``; a test compares them. A label never has a primary key, a host or a message.
"""

from __future__ import annotations

import os

from django.db import transaction
from django.http import HttpRequest, HttpResponse
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.exposition import choose_encoder

from dcl_processor import observers
from dcl_processor.metrics.collector import Collector
from dcl_processor.observers import Observer
from dcl_processor.registry import processors

from .exposition import ProcessMetrics, Tallies
from .gauges import Gauges

__all__ = ["gauges_view", "register"]

#: The observer that ``register()`` has added in this process.
_registered: Observer | None = None


def register(registry: CollectorRegistry | None = None) -> None:
    """Add the metrics of the runs in this process to a registry; call it once per process.

    ``registry``: the client's global one by default.

    In the client's multi-process mode, so if the variable ``PROMETHEUS_MULTIPROC_DIR`` is set, the
    metrics are written to its files, and a further call does nothing.
    """
    global _registered  # noqa: PLW0603  # one per process, as the client's registry is
    if _registered is not None:
        return
    registry = REGISTRY if registry is None else registry
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        _registered = ProcessMetrics(registry)
    else:
        collector = Collector()
        registry.register(Tallies(collector.snapshot))
        _registered = collector
    observers.add(_registered)


_gauges = CollectorRegistry()
_gauges.register(Gauges(lambda: processors().values()))


@transaction.non_atomic_requests
def gauges_view(request: HttpRequest) -> HttpResponse:
    """Answer a scrape with what the database knows of all processors, at most 15 seconds old.

    Each process of a web server reads for itself. The view checks no permission: add it to the URLs
    behind what keeps others away from them.
    """
    encode, content_type = choose_encoder(request.headers.get("Accept", ""))
    return HttpResponse(encode(_gauges), content_type=content_type)
