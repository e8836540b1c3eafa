"""How often something was killed, to show how much was tried."""

from __future__ import annotations

processes_killed = 0
sessions_ended = 0
