"""What an audit comes to, whatever it was that was audited."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

NUMBERS_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Verdict:
    """The figures, what is wrong with them, and what to say when nothing is."""

    figures: str
    complaints: tuple[str, ...]
    praise: str

    @property
    def clean(self) -> bool:
        """True if there is nothing to complain about."""
        return not self.complaints


def complaints(*found: tuple[str, Iterable[object]]) -> tuple[str, ...]:
    """Return a line for each kind of fault that was found, naming the first few."""
    return tuple(_line(fault, list(numbers)) for fault, numbers in found if numbers)


def _line(fault: str, numbers: Sequence[object]) -> str:
    shown = ", ".join(map(str, numbers[:NUMBERS_SHOWN]))
    more = f" and {len(numbers) - NUMBERS_SHOWN:,} more"
    return f"{fault} {shown}{more if len(numbers) > NUMBERS_SHOWN else ''}"
