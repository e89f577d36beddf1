from __future__ import annotations

import socket
import threading

import pytest
import uvicorn
from starlette.responses import PlainTextResponse

from overspill.errors import ConfigError
from overspill.serve.address import address_of, bound, is_loopback
from overspill.serve.protocol import timed_protocol


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "localhost", "LocalHost.", "::1"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "10.0.0.1", "example.org", "localhost.example.org", "127.0.0.1.nip.io", ""]
)
def test_not_loopback(host: str) -> None:
    assert not is_loopback(host)


def test_others_than_this_machine_want_a_key_or_permission() -> None:
    with pytest.raises(ConfigError) as told:
        bound("0.0.0.0", 0, anyone=False)
    assert "--api-key" in str(told.value)
    bound("0.0.0.0", 0, anyone=True).close()


def test_a_port_that_is_taken_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 cannot be had"):
            bound("127.0.0.1", port, anyone=False)


def test_the_address_is_the_one_bound() -> None:
    with bound("127.0.0.1", 0, anyone=False) as listener:
        assert address_of(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_a_head_that_does_not_end_is_given_up() -> None:
    config = uvicorn.Config(PlainTextResponse("here"), http=timed_protocol(0.2), lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    with bound("127.0.0.1", 0, anyone=False) as listener:
        address = listener.getsockname()
        listener.listen()
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            for unfinished in (b"", b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Slow: "):
                with socket.create_connection(address, timeout=60) as connection:
                    connection.sendall(unfinished)
                    assert connection.recv(4096) == b"", "the server ends the connection"
            with socket.create_connection(address, timeout=60) as connection:
                connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")
                connection.sendall(b"GET / HTTP/1.1\r\nHost: ")
                while connection.recv(4096):
                    pass
        finally:
            server.should_exit = True
            thread.join()
