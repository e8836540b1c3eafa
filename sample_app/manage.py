#!/usr/bin/env python
"""Django's command line for the sample shop."""

import os
import sys
from pathlib import Path


def main() -> None:
    """Run the management command named on the command line."""
    # Python puts this file's own folder first. From there, "shop" and "settings" could be
    # imported a second time under shorter names, so the checkout replaces it.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "sample_app.settings")
    from django.core.exceptions import ImproperlyConfigured
    from django.core.management import execute_from_command_line

    try:
        execute_from_command_line(sys.argv)
    except ImproperlyConfigured as error:
        sys.exit(f"The settings are not usable: {' '.join(str(error).split())}")
    except KeyboardInterrupt:
        sys.stderr.write("Interrupted.\n")
        sys.exit(130)  # the exit code of shells after a SIGINT


if __name__ == "__main__":
    main()
