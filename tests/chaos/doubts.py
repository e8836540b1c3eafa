"""Print the keys of the rows that a processor's ``in_doubt()`` shows, as JSON."""

from __future__ import annotations

import json
import sys

import django


def main() -> None:
    django.setup()
    from tests.chaos import processors

    processor = getattr(processors, sys.argv[1])
    print(json.dumps(sorted(processor.in_doubt(older_than=0).values_list("pk", flat=True))))


if __name__ == "__main__":
    main()
