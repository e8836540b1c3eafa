"""Settings for the night of ``docs/howto/operate.md``: the shop has the ledger and a gateway."""

from __future__ import annotations

import os

from sample_app.shop import payment_gateway
from tests.settings import *  # noqa: F403

DCL_PROCESSOR_LEDGER = True
PAYMENTS_URL = os.environ["PAYMENTS_URL"]
# A worker that waits for an answer is killed, and does not give up before.
payment_gateway.ANSWER_WITHIN = 600.0
