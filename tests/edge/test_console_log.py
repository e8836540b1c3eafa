"""What the package's loggers write to stderr where the project configures no logging."""

from __future__ import annotations

import pytest

from dcl_processor.processes.console_log import operations, quiet_unless_configured


class Written(list[str]):
    """A stderr that hands on each write as it comes, as Python's own does."""

    def write(self, text: str) -> None:
        self.append(text)

    def flush(self) -> None:
        pass


def test_a_line_is_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """All workers share one stderr, and another's line may come between two writes."""
    written = Written()
    monkeypatch.setattr("sys.stderr", written)
    monkeypatch.setattr("logging.root.handlers", [])
    with quiet_unless_configured():
        operations.error("a process died\nwhile it handled row %s", 7)
    assert len(written) == 1
    assert written[0].endswith("row 7\n")
    assert written[0].count("\n") == 1
