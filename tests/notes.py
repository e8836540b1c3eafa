"""The notes that runs leave of the rows in flight, kept apart from those of other tests."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import util

import pytest


@contextmanager
def notes_apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Have the notes in a new folder, which is removed in the end."""
    # Folders that outlive this one, wherever they are asked for first.
    tmp_path_factory.getbasetemp()
    util.get_temp_dir()  # multiprocessing's own, which it removes at the very end
    with (
        tempfile.TemporaryDirectory(prefix="dcl-notes-") as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("TMPDIR", folder)
        patch.setattr("tempfile.tempdir", None)
        yield


@pytest.fixture(autouse=True)
def of_each_test(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Have the notes in a folder of the test's own: the next one finds none."""
    with notes_apart(tmp_path_factory):
        yield
