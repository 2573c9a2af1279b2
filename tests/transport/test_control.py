"""Control connections: only who knows the secret is heard, and nothing that they send waits or grows without bound."""

import errno
import os
import socket
import struct
import threading
import time

import pytest

from gear_jax.testing.processes import free_ports
from gear_jax.transport import MalformedError, TransportError, _blob, _control

SECRET = b"s" * 32
HELLO = _blob.Hello(0, 2, 0, 1, {}, {"ucx": ""}, None, None)


class Server:
    """Listens for session 0; keeps what each peer said, and answers with it."""

    def __init__(self):
        self.address = ("127.0.0.1", free_ports(1)[0])
        self.heard = []
        _control.listen(self.address, SECRET, 0, self._serve)

    def _serve(self, channel, hello):
        self.heard.append(hello)
        channel.send(hello)
        self.heard.append(channel.receive())
        channel.wait_for_end()
        self.heard.append("end")

    def heard_in_time(self, count):
        until = time.monotonic() + 10
        while len(self.heard) < count:
            assert time.monotonic() < until, self.heard
            time.sleep(0.005)
        return self.heard


@pytest.fixture
def server():
    made = Server()
    yield made
    _control.stop_listening(made.address, 0)
    until = time.monotonic() + 10
    while [t for t in threading.enumerate() if t.name.startswith("gear_jax-")]:
        assert time.monotonic() < until, "a thread was left behind"
        time.sleep(0.01)


def ends(channel):
    channel.close()
    channel.release()


def test_messages_go_both_ways_and_the_end_is_seen(server):
    channel = _control.dial(server.address, SECRET)
    channel.send(HELLO)
    assert channel.receive() == HELLO
    channel.send(_blob.Open("ucx", bytes(range(256)) * 1000))
    server.heard_in_time(2)
    ends(channel)
    assert server.heard_in_time(3) == [HELLO, _blob.Open("ucx", bytes(range(256)) * 1000), "end"]


def test_the_wrong_secret_is_refused(server):
    with pytest.raises(TransportError, match="one without the job's secret"):
        _control.dial(server.address, b"t" * 32)
    assert server.heard == []


def test_a_server_with_the_wrong_secret_is_refused(server):
    with pytest.raises(TransportError, match="Give every process the same secret"):
        _control.dial(server.address, SECRET + b"x")


def test_a_session_that_is_not_there_yet_is_waited_for(server):
    channel = _control.dial(server.address, SECRET)
    channel.send(_blob.Hello(0, 2, 5, 1, {}, {}, None, None))
    assert channel.receive() == _blob.Wait()
    ends(channel)


def raw(server):
    return socket.create_connection(server.address, timeout=10)


NOISE = [b"", b"GET / HTTP/1.1\r\n\r\n", struct.pack("!I", 2**32 - 1), os.urandom(4096), b"\0" * 64]


@pytest.mark.parametrize("sent", NOISE, ids=["nothing", "http", "length", "random", "zeros"])
def test_who_does_not_shake_hands_is_turned_away(server, sent):
    with raw(server) as sock:
        got = b""
        try:  # a server that has turned it away already may reset the connection at any of these
            sock.sendall(sent)
            sock.shutdown(socket.SHUT_WR)
            while part := sock.recv(4096):
                got += part
        except OSError as error:
            assert error.errno in (errno.ECONNRESET, errno.EPIPE, errno.ENOTCONN)
        assert len(got) < 200  # the challenge
    assert server.heard == []
    ends(_control.dial(server.address, SECRET))  # it still listens


def test_who_says_nothing_is_turned_away_in_time(server, monkeypatch):
    monkeypatch.setattr(_control, "SECONDS", 0.3)
    with raw(server) as sock:
        while sock.recv(4096):
            pass  # the challenge, then the end


def test_many_who_say_nothing_keep_nobody_out_for_long(server, monkeypatch):
    monkeypatch.setattr(_control, "SECONDS", 1.0)
    silent = [raw(server) for _ in range(_control._MAX_HANDSHAKES + 10)]
    try:
        until = time.monotonic() + 20
        while True:
            try:
                channel = _control.dial(server.address, SECRET)
                break
            except (OSError, EOFError):
                assert time.monotonic() < until
        channel.send(HELLO)
        assert channel.receive() == HELLO
        ends(channel)
    finally:
        for sock in silent:
            sock.close()


def pair():
    """Two channels that have shaken hands, and the sockets below them."""
    a, b = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        a.close()
        b.close()
        a = socket.create_connection(listener.getsockname())
        b, _ = listener.accept()
    made = {}
    thread = threading.Thread(target=lambda: made.update(server=_control.Channel(b, SECRET, server=True)))
    thread.start()
    made["client"] = _control.Channel(a, SECRET, server=False)
    thread.join(10)
    return made["client"], made["server"]


def frame_of(channel, message):
    """The bytes that `send` would send."""
    payload = _blob.encode(message)
    return _control._code(channel._send_key, channel._sent, payload) + payload


def test_a_changed_message_is_refused():
    client, server = pair()
    frame = bytearray(frame_of(client, HELLO))
    frame[-2] ^= 1
    client.send_bytes(bytes(frame))
    with pytest.raises(MalformedError, match="wrong code"):
        server.receive()
    ends(client)
    ends(server)


def test_a_repeated_or_turned_round_message_is_refused():
    client, server = pair()
    frame = frame_of(client, HELLO)
    client.send_bytes(frame)
    client.send_bytes(frame)
    assert server.receive() == HELLO
    with pytest.raises(MalformedError, match="wrong code"):
        server.receive()
    server.send_bytes(frame)  # back to who sent it
    with pytest.raises(MalformedError, match="wrong code"):
        client.receive()
    ends(client)
    ends(server)


def test_a_message_of_another_connection_is_refused():
    client, server = pair()
    other_client, other_server = pair()
    client.send_bytes(frame_of(other_client, HELLO))
    with pytest.raises(MalformedError, match="wrong code"):
        server.receive()
    for channel in (client, server, other_client, other_server):
        ends(channel)


def test_too_long_a_message_is_not_even_read():
    client, server = pair()
    client._socket.sendall(struct.pack("!I", 2**31))
    with pytest.raises(MalformedError, match="at most"):
        server.receive()
    ends(client)
    ends(server)


def test_a_message_that_drips_is_given_up():
    client, server = pair()
    stop = threading.Event()

    def drip():
        client._socket.sendall(struct.pack("!I", 1000))
        while not stop.wait(0.05):
            client._socket.sendall(b"x")

    thread = threading.Thread(target=drip)
    thread.start()
    with pytest.raises(TimeoutError):
        server.receive(0.4)
    stop.set()
    thread.join(10)
    ends(client)
    ends(server)


def test_one_address_serves_the_sessions_of_one_job(server):
    heard = []
    _control.listen(server.address, SECRET, 1, lambda channel, hello: heard.append(hello))
    channel = _control.dial(server.address, SECRET)
    channel.send(_blob.Hello(0, 2, 1, 1, {}, {}, None, None))
    with pytest.raises((EOFError, OSError)):
        channel.receive()
    assert [h.session for h in heard] == [1]
    ends(channel)
    for session, secret, words in ((1, SECRET, "number: got 1, of a session"), (2, b"t" * 32, "another job")):
        with pytest.raises(TransportError, match=words):
            _control.listen(server.address, secret, session, lambda channel, hello: None)
    _control.stop_listening(server.address, 1)


def test_an_address_in_use_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(TransportError, match=r"job\.addresses"):
            _control.listen(taken.getsockname(), SECRET, 0, lambda channel, hello: None)


def test_a_connection_to_itself_is_none(monkeypatch):
    (port,) = free_ports(1)

    # As the kernel may do with one of the ports that it hands out: about once in 14,000 connections to a port where
    # nobody listens.
    class Itself(socket.socket):
        def connect(self, at):
            self.bind(at)
            super().connect(at)

    monkeypatch.setattr(_control.socket, "socket", Itself)
    with pytest.raises(ConnectionRefusedError):
        _control.dial(("127.0.0.1", port), SECRET)
    monkeypatch.undo()
    with socket.create_server(("127.0.0.1", port)) as listener:  # with what that has left behind
        assert listener.getsockname()[1] == port


def test_the_addresses_of_a_name_are_tried_in_turn(monkeypatch, server):
    found = socket.getaddrinfo(*server.address, type=socket.SOCK_STREAM)
    unknown = (4096, *found[0][1:])  # as IPv6's to a kernel without it
    monkeypatch.setattr(_control.socket, "getaddrinfo", lambda *_, **__: [unknown, *found])
    ends(_control.dial(server.address, SECRET))
    monkeypatch.setattr(_control.socket, "getaddrinfo", lambda *_, **__: [unknown])
    with pytest.raises(OSError, match="not supported"):
        _control.dial(server.address, SECRET)


def test_a_reserved_port_is_kept():
    port = _control.reserve("127.0.0.1")
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=5).close()  # bound, but nobody listens
    _control.listen(("127.0.0.1", port), SECRET, 0, lambda channel, hello: None)
    ends(_control.dial(("127.0.0.1", port), SECRET))
    _control.stop_listening(("127.0.0.1", port), 0)
