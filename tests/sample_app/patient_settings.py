"""Settings of the shop in which a payment waits for its answer until its process is killed."""

from __future__ import annotations

from sample_app.settings import *  # noqa: F403
from sample_app.shop import payment_gateway
from tests.waiting import PATIENCE

payment_gateway.ANSWER_WITHIN = PATIENCE
