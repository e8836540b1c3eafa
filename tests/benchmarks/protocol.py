"""Count messages and statements in the two streams of a PostgreSQL connection."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

#: The messages that ask the server for an answer: Query, Sync, Flush and FunctionCall.
_WANT_AN_ANSWER = frozenset(b"QSHF")

#: The start of the messages without a kind that ask for TLS and for GSSAPI.
_ENCRYPTION_REQUESTS = {number.to_bytes(4, "big") for number in (80877103, 80877104)}
_NO_ENCRYPTION = b"N"

_NO_KIND = 0
_COMMAND_COMPLETE = ord("C")
_BRACKETS = {b"BEGIN", b"START TRANSACTION", b"COMMIT", b"ROLLBACK"}


class EncryptedError(Exception):
    """The connection is encrypted, so that its messages cannot be read."""


@dataclass(slots=True)
class Counts:
    """What all connections together have sent.

    ``messages``: those that ask for an answer. A simple query is one, however many statements it
    has; in the extended protocol it is everything up to a Sync or a Flush. The messages that open
    a connection are not counted. ``statements``: those that were executed, but BEGIN, COMMIT and
    ROLLBACK.
    """

    messages: int = 0
    statements: int = 0


class Conversation:
    """Count the messages of one client, and the statements whose end the server tells it."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._requests = _Messages(_NO_KIND, has_kind=False)
        self._answers = _Messages(_COMMAND_COMPLETE)
        self._asks_for_encryption = False

    def request(self, chunk: bytes) -> None:
        """Count what the client sends."""
        for kind, content in self._requests.split(chunk):
            self._counts.messages += kind in _WANT_AN_ANSWER
            if kind == _NO_KIND and content[:4] in _ENCRYPTION_REQUESTS:
                self._asks_for_encryption = True
                # The client starts again once it has the answer.
                self._requests.has_kind = False

    def answer(self, chunk: bytes) -> None:
        """Count what the server sends; raise ``EncryptedError`` if it agrees to encrypt."""
        if self._asks_for_encryption:
            self._asks_for_encryption = False
            # This answer is one byte, and no message.
            agreement, chunk = chunk[:1], chunk[1:]
            if agreement != _NO_ENCRYPTION:
                raise EncryptedError("expected a connection without encryption, got one with it.")
        for kind, content in self._answers.split(chunk):
            if kind == _COMMAND_COMPLETE:
                self._counts.statements += content.rstrip(b"\0") not in _BRACKETS


class _Messages:
    """Cut a stream into its messages, wherever its chunks end.

    ``read``: the kind whose content is wanted. The others are skipped, so that a long message is
    never kept. ``has_kind``: whether the next message starts with a byte for its kind.
    """

    def __init__(self, read: int, *, has_kind: bool = True) -> None:
        self.has_kind = has_kind
        self._read = read
        self._rest = b""
        self._skip = 0  # bytes of the next chunk that belong to a message already yielded

    def split(self, chunk: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield the kind of each message that the chunk brings, and its content if wanted."""
        data, at = self._rest + chunk, self._skip
        while (length_at := at + self.has_kind) + 4 <= len(data):
            kind = data[at] if self.has_kind else _NO_KIND
            content_at = length_at + 4
            end = length_at + int.from_bytes(data[length_at:content_at], "big")
            is_read = kind == self._read
            if is_read and end > len(data):
                break  # the next chunk brings the rest of it
            at, self.has_kind = end, True
            yield kind, data[content_at:end] if is_read else b""
        self._rest, self._skip = data[at:], max(at - len(data), 0)
