"""How often something was killed, for whoever wants to know how much was tried."""

from __future__ import annotations

processes_killed = 0
sessions_ended = 0
