"""Connections between the processes of a job: who does not know the secret is refused.

Both ends prove that they know it (the handshake of `multiprocessing.connection`), then every message carries a code
made with a key of this one connection, so that nobody on the way can add, change, repeat or leave out any. Messages are
not encrypted. Each receive is bounded in size and in time. Nothing is ever unpickled.
"""

import errno
import hashlib
import hmac
import multiprocessing
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import answer_challenge, deliver_challenge

from gear_jax.transport import _blob
from gear_jax.transport._errors import MalformedError, TransportError, malformed, transport_error

SECONDS = 10.0  # that a handshake may take, or a message once it has begun
_CODE_BYTES = 32
_MAX_HANDSHAKES = 64  # at a time: others are turned away

_reserved: dict[tuple[str, int], socket.socket] = {}
_listeners: dict[tuple[str, int], "_Listener"] = {}
_lock = threading.Lock()


class Channel:
    """A connection whose other end knows the secret. One thread sends and one receives at a time."""

    def __init__(self, sock: socket.socket, secret: bytes, *, server: bool, who: str = "peer"):
        self._socket = sock
        self._deadline = time.monotonic() + SECONDS
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 10_000)  # ms; a host that is gone
            handshake = (deliver_challenge, answer_challenge) if server else (answer_challenge, deliver_challenge)
            for step in handshake:
                step(self, secret)  # type: ignore[arg-type]  # it needs send_bytes and recv_bytes only
            mine = os.urandom(_CODE_BYTES)
            self.send_bytes(mine)
            theirs = self.recv_bytes(_CODE_BYTES)
        except BaseException as e:
            sock.close()
            if isinstance(e, multiprocessing.AuthenticationError | AssertionError | ValueError | MalformedError):
                fix = "Give every process the same secret."
                got, wanted = "one without the job's secret", "one with it"
                raise transport_error(who, got=got, wanted=wanted, fix=fix) from None
            raise
        nonces = theirs + mine if server else mine + theirs
        keys = [hmac.digest(secret, name + nonces, hashlib.sha256) for name in (b"to server", b"to client")]
        self._receive_key, self._send_key = keys if server else reversed(keys)
        self._sent = self._received = 0

    def send(self, message: _blob.Message) -> None:
        """Sends a message. Raises OSError if the connection has ended or takes too long."""
        self._deadline = time.monotonic() + SECONDS
        payload = _blob.encode(message)
        self.send_bytes(_code(self._send_key, self._sent, payload) + payload)
        self._sent += 1

    def receive(self, seconds: float = SECONDS) -> _blob.Message:
        """Waits for a message.

        Raises:
          EOFError, OSError: if the connection has ended, or nothing came (`TimeoutError`).
          MalformedError: if what came is no message of this peer.
        """
        self._deadline = time.monotonic() + seconds
        frame = self.recv_bytes(_CODE_BYTES + _blob.MAX_BYTES)
        payload = frame[_CODE_BYTES:]
        if not hmac.compare_digest(frame[:_CODE_BYTES], _code(self._receive_key, self._received, payload)):
            raise malformed("message", got="one with a wrong code", wanted="one of the job's processes")
        self._received += 1
        return _blob.decode(payload)

    def fileno(self) -> int:
        """For `select`; -1 once closed."""
        return self._socket.fileno()

    def wait_for_end(self) -> None:
        """Returns when the other end has gone, or `close` was called. Whatever else comes ends it too."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.poll()

    def close(self) -> None:
        """Ends the connection; the other end sees it at once. Thread-safe."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def release(self) -> None:
        """Closes the file, once nobody waits on it."""
        self._socket.close()

    def send_bytes(self, payload: bytes) -> None:
        """As of `multiprocessing.connection.Connection`, by the deadline."""
        self._socket.settimeout(self._left())
        self._socket.sendall(struct.pack("!I", len(payload)) + payload)

    def recv_bytes(self, maxlength: int | None = None) -> bytes:
        """As of `multiprocessing.connection.Connection`, by the deadline."""
        (size,) = struct.unpack("!I", self._exactly(4))
        if maxlength is not None and size > maxlength:
            raise malformed("message", got=f"{size} bytes", wanted=f"at most {maxlength}")
        return self._exactly(size)

    def _exactly(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            self._socket.settimeout(self._left())
            part = self._socket.recv(min(size - len(parts), 1 << 16))
            if not part:
                raise EOFError("the connection has ended")
            parts += part
        return bytes(parts)

    def _left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the other end is too slow")
        return left


def _code(key: bytes, number: int, payload: bytes) -> bytes:
    return hmac.digest(key, struct.pack("!Q", number) + payload, hashlib.sha256)


def dial(address: tuple[str, int], secret: bytes, who: str = "peer") -> Channel:
    """Connects to a process; `who` it is, for errors.

    Raises:
      OSError, EOFError: if it is not there. TransportError: if it does not know the secret.
    """
    return Channel(_connect(address), secret, server=False, who=who)


def _connect(address: tuple[str, int]) -> socket.socket:
    """A connection to the process that listens at an address, never to itself.

    The kernel may give a socket that connects the very port it connects to, if that is one of those it hands out and
    nobody listens there yet; the two ends are then one, and the process that the port belongs to cannot listen.
    """
    error: OSError | None = None
    for family, kind, protocol, _, at in socket.getaddrinfo(*address, type=socket.SOCK_STREAM):
        sock = None
        try:
            sock = socket.socket(family, kind, protocol)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # whatever its port is, one may listen there
            sock.settimeout(SECONDS)
            sock.connect(at)
            if sock.getsockname() == sock.getpeername():
                raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
            return sock
        except OSError as e:
            if sock is not None:
                sock.close()
            error = e
    assert error is not None
    try:
        raise error
    finally:
        del error  # and not keep the callers' frames with it


def reserve(host: str) -> int:
    """A free port of this machine, held until `listen` is called for it."""
    sock = _bind((host, 0))
    port = sock.getsockname()[1]
    with _lock:
        _reserved[host, port] = sock
    return port


def _bind(address: tuple[str, int]) -> socket.socket:
    family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    return sock


Serve = Callable[[Channel, _blob.Hello], None]


class _Listener:
    """Takes connections at one address, for the sessions of one job: a thread, and one more for each connection."""

    def __init__(self, address: tuple[str, int], secret: bytes):
        self.secret = secret
        self.sessions: dict[int, Serve] = {}
        self.refused = 0
        self._socket = _reserved.pop(address, None) or _bind(address)
        self._socket.listen(128)
        self._handshakes = threading.BoundedSemaphore(_MAX_HANDSHAKES)
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name="gear_jax-listener", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._socket.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(0.1)  # out of file descriptors
                continue
            if not self._handshakes.acquire(blocking=False):
                sock.close()
                continue
            try:
                threading.Thread(target=self._greet, args=(sock,), name="gear_jax-peer", daemon=True).start()
            except RuntimeError:  # there can be no more threads now; the peer tries again
                self._handshakes.release()
                sock.close()

    def _greet(self, sock: socket.socket) -> None:
        channel = None
        try:
            try:
                channel = Channel(sock, self.secret, server=True)
                hello = channel.receive()
            except TransportError:
                self.refused += 1
                raise
            finally:
                self._handshakes.release()
            if not isinstance(hello, _blob.Hello):
                return
            serve = self.sessions.get(hello.session)
            if serve is None:
                channel.send(_blob.Wait())
            else:
                serve(channel, hello)
        except (OSError, EOFError, TransportError):
            pass  # a peer that went, or none of ours
        finally:
            if channel is not None:
                channel.close()
                channel.release()

    def close(self) -> None:
        self._closed = True
        try:
            self._socket.shutdown(socket.SHUT_RDWR)  # ends accept
        except OSError:
            pass
        self._socket.close()
        self._thread.join(SECONDS)


def listen(address: tuple[str, int], secret: bytes, session: int, serve: Serve) -> None:
    """Has `serve` called, in a thread of its own, for each peer that greets this session.

    Raises:
      TransportError: if nobody can listen at the address, or another job does.
    """
    with _lock:
        listener = _listeners.get(address)
        if listener is None:
            try:
                listener = _listeners[address] = _Listener(address, secret)
            except OSError as e:
                fix = "Choose an address of this machine and a free port that the kernel does not hand out"
                fix += " (see net.ipv4.ip_local_port_range), or use `Job.current()`."
                got = f"{address[0]}:{address[1]} ({e})"
                raise transport_error("job.addresses", got=got, wanted="one to listen at", fix=fix) from None
        if session in listener.sessions:
            fix = "Close that one first, or leave number= out."
            raise transport_error("number", got=f"{session}, of a session that is open", wanted="another", fix=fix)
        if not hmac.compare_digest(listener.secret, secret):
            fix = "Give each job addresses of its own."
            got = f"{address[0]}:{address[1]}, in use by another job of this process"
            raise transport_error("job.addresses", got=got, wanted="a free one", fix=fix)
        listener.sessions[session] = serve


def refused(address: tuple[str, int]) -> int:
    """How many connections to an address that this process listens at were refused: without the secret, say."""
    with _lock:
        listener = _listeners.get(address)
    return 0 if listener is None else listener.refused


def stop_listening(address: tuple[str, int], session: int) -> None:
    """Ends what `listen` began; the last session of an address closes it."""
    with _lock:
        listener = _listeners.get(address)
        if listener is None or listener.sessions.pop(session, None) is None or listener.sessions:
            return
        del _listeners[address]
    listener.close()
