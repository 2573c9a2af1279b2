"""The reader's connections to its peers, kept up in the background."""

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from gear_jax.transport._control import Channel

_LOOK = 0.1  # seconds between two looks at what C++ has lost
_CLOSING = 0.2  # seconds that `close` waits for one that is being connected; it ends by itself
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0  # seconds before a peer that did not answer is tried again


class Links:
    """One channel to each peer. Its end, or a loss that C++ has seen, ends the connection, and a new one is tried.

    Args:
      native: the session's C++ side.
      peers: whom to connect to.
      connect: connects to one, in a thread of its own, and returns the channel; what it raises is a reason to try
        again.
    """

    def __init__(self, native: Any, peers: Sequence[int], connect: Callable[[int], Channel]):
        self._native, self._connect = native, connect
        self._changed = threading.Condition()
        self._channels: dict[int, Channel] = {}
        self._reasons = dict.fromkeys(peers, "not tried yet")  # of those that are not connected
        self._dialling: dict[int, threading.Thread] = {}
        self._pauses = dict.fromkeys(peers, _FIRST_PAUSE)
        self._next = dict.fromkeys(peers, 0.0)
        self._paused: set[int] = set()
        self._closed = False
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_out.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="gear_jax-links", daemon=True)
        self._thread.start()

    def waiting(self) -> dict[int, str]:
        """The peers that are not connected, and why."""
        with self._changed:
            return dict(self._reasons)

    @contextlib.contextmanager
    def paused(self, peer: int) -> Iterator[None]:
        """Leaves a peer alone meanwhile: what is lost stays lost."""
        with self._changed:
            self._paused.add(peer)
            while peer in self._dialling:
                self._changed.wait()
        try:
            yield
        finally:
            with self._changed:
                self._paused.remove(peer)

    def hurry(self, peer: int) -> None:
        """Tries a peer at once that is not connected: it has just been heard of."""
        with self._changed:
            self._next[peer], self._pauses[peer] = 0.0, _FIRST_PAUSE
        self._wake()

    def wait_for_change(self, seconds: float) -> None:
        """Waits until a peer was connected or lost, at most so long."""
        with self._changed:
            self._changed.wait(seconds)

    def close(self) -> None:
        """Ends all channels and the threads."""
        with self._changed:
            self._closed = True
            dialling = list(self._dialling.values())
        self._wake()
        self._thread.join()
        for thread in dialling:
            thread.join(_CLOSING)
        for channel in self._channels.values():
            channel.close()
            channel.release()
        self._channels.clear()
        self._wake_in.close()
        self._wake_out.close()

    def _wake(self) -> None:
        try:
            self._wake_in.send(b"x")
        except OSError:
            pass

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                channels = dict(self._channels)
                now = time.monotonic()
                for peer in self._reasons:
                    if peer not in self._dialling and peer not in self._paused and self._next[peer] <= now:
                        thread = threading.Thread(target=self._dial, args=(peer,), name="gear_jax-dial", daemon=True)
                        try:
                            thread.start()  # it waits for this lock before it says that it has ended
                        except RuntimeError as e:  # there can be no more threads now
                            self._reasons[peer], self._next[peer] = str(e), now + _LONGEST_PAUSE
                            continue
                        self._dialling[peer] = thread
            ended = self._look(channels)
            alive = self._native.alive()
            for peer, channel in channels.items():
                if peer in ended or not alive[peer]:
                    self._lose(peer, channel, "its process has ended" if peer in ended else "it was lost")

    def _look(self, channels: dict[int, Channel]) -> set[int]:
        poll = select.poll()
        peers = {channel.fileno(): peer for peer, channel in channels.items()}
        for fd in [*peers, self._wake_out.fileno()]:
            poll.register(fd, select.POLLIN)
        ready = [fd for fd, _ in poll.poll(_LOOK * 1000)]
        try:
            while self._wake_out.recv(4096):
                pass
        except BlockingIOError:
            pass
        return {peers[fd] for fd in ready if fd in peers}

    def _lose(self, peer: int, channel: Channel, why: str) -> None:
        self._native.disconnect(peer)
        channel.close()
        channel.release()
        with self._changed:
            del self._channels[peer]
            self._reasons[peer] = why
            self._next[peer] = 0.0
            self._pauses[peer] = _FIRST_PAUSE
            self._changed.notify_all()

    def _dial(self, peer: int) -> None:
        channel, why = None, ""
        try:
            channel = self._connect(peer)
        except Exception as e:  # whatever it is, the next try may go better; `waiting` tells it
            why = str(e) or type(e).__name__
        with self._changed:
            del self._dialling[peer]
            if self._closed:
                if channel is not None:  # nobody waited for it
                    channel.close()
                    channel.release()
                return
            if channel is None:
                self._reasons[peer] = why
                self._next[peer] = time.monotonic() + self._pauses[peer]
                self._pauses[peer] = min(2 * self._pauses[peer], _LONGEST_PAUSE)
            else:
                del self._reasons[peer]
                self._channels[peer] = channel
            self._changed.notify_all()
        self._wake()
