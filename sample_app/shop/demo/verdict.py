"""The result of an audit of any kind."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

NUMBERS_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Verdict:
    """The figures, the complaints about them, and the text to print if there are none."""

    figures: str
    complaints: tuple[str, ...]
    praise: str

    @property
    def clean(self) -> bool:
        """True if there are no complaints."""
        return not self.complaints


def complaints(*found: tuple[str, Iterable[object]]) -> tuple[str, ...]:
    """Return a line for each kind of fault that was found, with the first few numbers."""
    return tuple(_line(fault, list(numbers)) for fault, numbers in found if numbers)


def _line(fault: str, numbers: Sequence[object]) -> str:
    shown = ", ".join(map(str, numbers[:NUMBERS_SHOWN]))
    more = f" and {len(numbers) - NUMBERS_SHOWN:,} more"
    return f"{fault} {shown}{more if len(numbers) > NUMBERS_SHOWN else ''}"
