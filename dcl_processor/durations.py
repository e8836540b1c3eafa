"""Durations as people write them."""

from __future__ import annotations


def span(seconds: float) -> str:
    """Write a duration in its largest unit, rounded down."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size:.0f} {unit}"
    return f"{max(seconds, 0) // 1:.0f} s"


def about(seconds: float) -> str:
    """Write a duration that is not exact."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 1.5 * size:
            return f"about {seconds / size:.0f} {unit}"
    return f"about {max(seconds, 1):.0f} s"
