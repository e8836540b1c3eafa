"""A robot that packs orders: it pulls a packing, keeps it while it packs, and reports the weight.

python -m sample_app.shop.demo.packing_robot http://localhost:8000/packings robot-1 KEY [SECONDS]

SECONDS: how long a packing takes, 0 by default.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

#: Seconds between two renewals: a third of the shop's lease.
PAUSE = 20.0

#: Seconds for an answer.
ANSWER_WITHIN = 30.0

Pack = Callable[[int], int]


class Robot:
    """Packs orders for a shop; ``pack``: packs the order of a number, and returns its grams."""

    def __init__(self, url: str, name: str, key: str, pack: Pack) -> None:
        self._url = url
        self._authorization = f"Robot {name}:{key}"
        self._pack = pack

    def work(self) -> int:
        """Pack until there is nothing to pack; return how many orders were packed."""
        packed = 0
        while packings := self._call("pull")[1]["packings"]:
            for packing in packings:
                packed += self._pack_one(packing["token"], packing["order"])
        return packed

    def _pack_one(self, token: str, order: int) -> bool:
        """Return whether the shop has stored the weight, which another robot may have done."""
        over = threading.Event()
        heartbeat = threading.Thread(target=self._keep, args=(token, over), daemon=True)
        heartbeat.start()
        try:
            grams = self._pack(order)
        except Exception as error:  # noqa: BLE001  # the shop decides what becomes of the packing
            self._call("fail", token=token, reason=f"{type(error).__name__}: {error}")
            return False
        finally:
            over.set()
            heartbeat.join()
        status, _ = self._call("settle", token=token, grams=grams)
        return status == HTTPStatus.OK

    def _keep(self, token: str, over: threading.Event) -> None:
        """Renew the lease until the packing is done, or belongs to another robot."""
        while not over.wait(PAUSE):
            status, _ = self._call("renew", token=token)
            if status != HTTPStatus.OK:
                return

    def _call(self, method: str, **body: Any) -> tuple[int, dict[str, Any]]:
        """Call the shop; return the status and the answer."""
        request = Request(  # noqa: S310  # the shop's own URL
            f"{self._url}/{method}",
            data=json.dumps(body).encode(),
            headers={"Authorization": self._authorization, "Content-Type": "application/json"},
        )
        try:
            with urlopen(request, timeout=ANSWER_WITHIN) as answer:  # noqa: S310  # as above
                return answer.status, json.load(answer)
        except HTTPError as error:
            with error:
                if error.code in {HTTPStatus.CONFLICT, HTTPStatus.GONE}:
                    return error.code, json.load(error)
                raise


def weigh(order: int) -> int:
    """Stand for the scales."""
    return 500 + order % 1000


def main() -> None:
    """Work for the shop at the URL of the command line."""
    url, name, key, *takes = sys.argv[1:]

    def pack(order: int) -> int:
        time.sleep(float(takes[0]) if takes else 0.0)
        return weigh(order)

    print(f"{name} has packed {Robot(url, name, key, pack).work()} orders")


if __name__ == "__main__":
    main()
