"""Count messages and commits in the two streams of a PostgreSQL connection, as they pass.

The streams must not be encrypted; on a Unix socket they never are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

#: What a client waits for an answer to: Query, Sync, FunctionCall and Flush.
_WANT_AN_ANSWER = frozenset(b"QSFH")

_COMMAND_COMPLETE, _READY_FOR_QUERY, _ERROR = b"CZE"
_IDLE = b"I"


@dataclass(slots=True)
class Counts:
    """What all connections together have sent and committed.

    ``messages``: those that want an answer, so a simple query is one, and so is all that the
    extended protocol sends up to a Sync. ``commits``: transactions that the server has committed,
    which includes statements without BEGIN, and transactions that only read.
    """

    messages: int = 0
    commits: int = 0


class _Messages:
    """Cut one direction of a connection into its messages, however its chunks are cut.

    ``read``: the kinds whose content is wanted; the others are passed over, so that a long one is
    never held. ``greets``: the first message has no kind, as that of a client.
    """

    def __init__(self, read: bytes = b"", *, greets: bool = False) -> None:
        self._read = read
        self._head = 4 if greets else 5  # bytes: the kind, and the length
        self._rest = b""
        self._skip = 0  # bytes of the next chunk that belong to a message already seen

    def split(self, chunk: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield the kind of each message that the chunk brings, and its content if wanted."""
        data, at = self._rest + chunk, self._skip
        while at + self._head <= len(data):
            length = int.from_bytes(data[at + self._head - 4 : at + self._head]) + self._head - 4
            kind = data[at] if self._head == 5 else 0
            is_read = kind in self._read
            if is_read and at + length > len(data):
                break  # the rest of it comes with the next chunk
            yield kind, data[at + 5 : at + length] if is_read else b""
            at += length
            self._head = 5
        self._rest, self._skip = data[at:], max(at - len(data), 0)


class Requests:
    """Counts the messages of one client."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._messages = _Messages(greets=True)

    def feed(self, chunk: bytes) -> None:
        for kind, _ in self._messages.split(chunk):
            self._counts.messages += kind in _WANT_AN_ANSWER


class Answers:
    """Counts the commits of one session by what the server says: no statement is parsed.

    Each command that succeeds is confirmed by its tag. COMMIT's own tag is a commit, except that
    it reads ROLLBACK when the transaction had failed. Any other command outside a block is a
    commit once the server is idle again, and no error came between. Not seen: what a procedure
    commits inside its CALL, and a statement that follows the ROLLBACK of a transaction with
    savepoints in the same message.
    """

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._messages = _Messages(bytes((_COMMAND_COMPLETE, _READY_FOR_QUERY)))
        self._in_block = False
        self._has_savepoint = False
        self._uncommitted = False  # a statement without BEGIN was executed

    def feed(self, chunk: bytes) -> None:
        for kind, content in self._messages.split(chunk):
            if kind == _COMMAND_COMPLETE:
                self._completed(content.rstrip(b"\0"))
            elif kind == _ERROR:
                self._uncommitted = False
            elif kind == _READY_FOR_QUERY:
                self._ready(content)

    def _completed(self, tag: bytes) -> None:
        if tag == b"COMMIT":
            self._counts.commits += 1
            self._in_block = self._uncommitted = False
        elif tag in {b"BEGIN", b"START TRANSACTION"}:
            # Statements of the same message before it belong to the block.
            self._in_block, self._uncommitted = True, False
            self._has_savepoint = False
        elif tag == b"ROLLBACK":
            # That of ROLLBACK TO SAVEPOINT, too: then the server's state says what it was.
            self._in_block &= self._has_savepoint
            self._uncommitted = False
        elif self._in_block:
            self._has_savepoint |= tag == b"SAVEPOINT"
        else:
            self._uncommitted = True

    def _ready(self, state: bytes) -> None:
        self._counts.commits += self._uncommitted and state == _IDLE
        self._uncommitted = False
        self._in_block = state != _IDLE
