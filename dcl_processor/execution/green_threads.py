"""Refuse what needs real threads where a library has put greenlets in their place."""

from __future__ import annotations

import sys

from dcl_processor.exceptions import Unsupported


def refuse_green_threads(label: str, what: str, fix: str) -> None:
    """Raise if threads are greenlets, which share one thread.

    ``what``: needs real threads; ``fix``: does without. The libraries are looked up by name, since
    only a process that imported one can be patched.
    """
    for module, asked, name in (
        ("gevent.monkey", "is_module_patched", "threading"),
        ("eventlet.patcher", "is_monkey_patched", "thread"),
    ):
        if module in sys.modules and getattr(sys.modules[module], asked)(name):
            raise Unsupported(
                f"{label}: expected real threads for {what}, got threads patched by "
                f"{module.partition('.')[0]}; {fix}, or run it in a process that is not patched."
            )
