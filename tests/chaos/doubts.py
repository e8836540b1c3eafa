"""Print the keys of the rows that ``in_doubt()`` shows, as JSON."""

from __future__ import annotations

import json

import django


def main() -> None:
    django.setup()
    from tests.chaos.processors import at_most_once

    print(json.dumps(sorted(at_most_once.in_doubt(older_than=0).values_list("pk", flat=True))))


if __name__ == "__main__":
    main()
