"""The private Redis serves whom it is for, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis as client

from tests.servers.redis import is_installed, redis


@pytest.mark.skipif(not is_installed(), reason="redis-server is not installed")
def test_it_answers_and_is_gone_afterwards() -> None:
    with redis() as url:
        socket = Path(url.removeprefix("redis+socket://"))
        with client.Redis(unix_socket_path=str(socket)) as asking:
            assert asking.ping()
            assert asking.config_get("save") == {"save": ""}
    assert not socket.parent.exists()
    with (
        client.Redis(unix_socket_path=str(socket)) as asking,
        pytest.raises(client.ConnectionError),
    ):
        asking.ping()
