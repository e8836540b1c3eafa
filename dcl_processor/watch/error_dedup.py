"""Reports a trouble when it begins, changes or lasts, and its end once."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

from dcl_processor import steady as time
from dcl_processor.diagnosis import Trouble

#: Seconds after which a lasting trouble is reported again.
REMIND_EVERY = 3600.0


@dataclass(frozen=True, slots=True)
class _Outage:
    """One trouble; ``lacking`` is the same for a server that is gone and one that is starting."""

    lacking: str
    sentence: str
    since: float
    said_at: float
    tries: int = 1


class ErrorDedup:
    """The processors and workers that are in trouble, why, and since when."""

    def __init__(self) -> None:
        self._open: dict[Hashable, _Outage] = {}

    def say(self, who: Hashable, trouble: Trouble) -> str | None:
        """Note the trouble; return the line to report, if any.

        A trouble that lasts, or that another processor has as well, is reported again only if its
        cause changes, or after ``REMIND_EVERY``.
        """
        now, sentence = time.monotonic(), trouble.sentence
        lacking = _lacking(sentence)
        alike = [each for each in self._open.values() if each.lacking == lacking]
        outage = self._open.get(who)
        if outage is None or outage.lacking != lacking:
            outage = _Outage(lacking, sentence, now, said_at=0.0, tries=0)
        outage = replace(outage, sentence=sentence, tries=outage.tries + 1)
        said: str | None = None
        if not any(each.sentence == sentence for each in alike):
            said = sentence
        elif now - max(each.said_at for each in alike) >= REMIND_EVERY:
            hours = (now - outage.since) / 3600
            said = f"after {outage.tries} tries in {hours:.1f} hours, still: {sentence}"
        self._open[who] = outage if said is None else replace(outage, said_at=now)
        return said

    def end(self, who: Hashable) -> float | None:
        """Note that the trouble is over.

        Returns how many seconds it lasted, if no other open trouble lacks the same.
        """
        outage = self._open.pop(who, None)
        if outage is None or any(outage.lacking == each.lacking for each in self._open.values()):
            return None
        return time.monotonic() - outage.since


def _lacking(sentence: str) -> str:
    return sentence.partition(", got")[0]
