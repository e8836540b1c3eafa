"""The robots' side of the shop: pull a packing, keep it, and report the weight; all in JSON.

A robot proves who it is with a key of its own, and each token is bound to its robot: a token that
leaks is of no use to another one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import wraps
from http import HTTPStatus
from typing import Any

from django.conf import settings
from django.db import transaction
from django.http import HttpRequest, JsonResponse
from django.utils.crypto import constant_time_compare
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from dcl_processor.contrib.reservations import Reservation
from dcl_processor.exceptions import InvalidToken, ReservationLost
from sample_app.shop.models import Packing
from sample_app.shop.packing import confirm, has_room, is_within_limit, pack_orders, robot

Body = dict[str, Any]
View = Callable[[HttpRequest], JsonResponse]

#: A call that is repeated, because its answer was lost, has succeeded the first time.
STATUS = {
    "settled": HTTPStatus.OK,
    "taken_over": HTTPStatus.CONFLICT,
    "lapsed": HTTPStatus.CONFLICT,
    "gone": HTTPStatus.GONE,
}


NO_ROOM: Body = {"packings": [], "error": "settle or release what you hold first"}


class RobotError(Exception):
    """What a robot reports as the reason of its failure."""


def for_robots(view: Callable[[str, Body], Body]) -> View:
    """Make a view of a function of the robot's name and the body that it has sent."""

    # Each call makes its own commit, also in a project with ATOMIC_REQUESTS.
    @transaction.non_atomic_requests
    @csrf_exempt
    @require_POST
    @wraps(view)
    def answer(request: HttpRequest) -> JsonResponse:
        name = _robot_of(request)
        if name is None:
            return _error(HTTPStatus.UNAUTHORIZED, "unknown robot")
        try:
            return JsonResponse(view(name, json.loads(request.body)))
        except ReservationLost as lost:
            return _error(STATUS[lost.reason], lost.reason)
        except InvalidToken:
            return _error(HTTPStatus.BAD_REQUEST, "invalid token")
        except (KeyError, TypeError, ValueError) as error:
            return _error(HTTPStatus.BAD_REQUEST, repr(error))

    return answer


@for_robots
def pull(name: str, body: Body) -> Body:  # noqa: ARG001  # a robot asks for one, without a wish
    """Hand out the next packing, if there is one and the robot has room for it."""
    if not has_room(name):
        return NO_ROOM
    held = robot.set(name)
    try:
        reserved = pack_orders.reserve(1, bound_to=name)
    finally:
        robot.reset(held)
    try:
        for each in reserved:
            if not confirm(name, each.row):
                each.release()
                return NO_ROOM
        return {"packings": [_described(each) for each in reserved]}
    except BaseException:
        # Nothing was handed out yet, so no attempt is counted. What is lost behind this point is
        # handed out again when its lease has lapsed, and has used up an attempt.
        for each in reserved:
            each.release()
        raise


@for_robots
def renew(name: str, body: Body) -> Body:
    """Let a robot keep its packing, if it has room for it; the token stays the same."""
    reservation = _reservation(name, body)
    reservation.renew()
    if not is_within_limit(name):
        reservation.release()
        raise ReservationLost(pack_orders.name, reservation.row.pk, "lapsed")
    return {"expires_at": reservation.expires_at}


@for_robots
def settle(name: str, body: Body) -> Body:
    """Store the weight, and take the packing out of the robots' list."""
    grams = body["grams"]
    if type(grams) is not int or grams <= 0:
        raise ValueError(f"expected grams above 0, got {grams!r}")
    _reservation(name, body).settle(grams)
    return {"state": Packing.State.PACKED}


@for_robots
def fail(name: str, body: Body) -> Body:
    """Count a failure; the packing is handed out again later, or is stuck."""
    _reservation(name, body).settle(RobotError(str(body["reason"])))
    return {}


@for_robots
def release(name: str, body: Body) -> Body:
    """Take a packing back that the robot has not begun."""
    _reservation(name, body).release()
    return {}


def _reservation(name: str, body: Body) -> Reservation[Packing]:
    return pack_orders.reservation(body["token"], bound_to=name)


def _described(reservation: Reservation[Packing]) -> Body:
    return {
        "token": reservation.token,
        "expires_at": reservation.expires_at,
        "order": reservation.row.order.number,
    }


def _robot_of(request: HttpRequest) -> str | None:
    """Return the name of the robot whose key the request has."""
    name, _, key = request.headers.get("Authorization", "").removeprefix("Robot ").partition(":")
    known = settings.ROBOT_KEYS.get(name)
    return name if known and constant_time_compare(known, key) else None


def _error(status: HTTPStatus, error: str) -> JsonResponse:
    return JsonResponse({"error": error}, status=status)
