"""The processes that may read each other's memory."""

import dataclasses
import os
import secrets
import socket

from gear_jax._errors import value_error
from gear_jax.transport import _control

_SECRET_BYTES = 32
_HOST_BYTES = 256


@dataclasses.dataclass(frozen=True)
class Job:
    """The processes of a job, the same in each of them but for `rank`.

    A process that has ended may be started again with the same job: it connects to the others, and they to it.

    Attributes:
      rank: the number of this process.
      addresses: (host, port) at which each process listens for the others; it binds to its own. Ports that the kernel
        hands out (net.ipv4.ip_local_port_range) may be taken when a process starts, and then it cannot.
      secret: what they know and nobody else, 16 bytes or more, e.g. `secrets.token_bytes(32)`. A connection whose other
        end does not know it is refused. Never put it into a command line, which others on the machine can read.

    Raises:
      ValueError: naming the field.
    """

    rank: int
    addresses: tuple[tuple[str, int], ...]
    secret: bytes = dataclasses.field(repr=False)

    def __post_init__(self) -> None:
        addresses = tuple((str(host), int(port)) for host, port in self.addresses)
        object.__setattr__(self, "addresses", addresses)
        if not 0 <= self.rank < len(addresses):
            wanted = f"a number from 0 to {len(addresses) - 1}, one of `addresses`"
            raise value_error("rank", got=self.rank, wanted=wanted, fix="Give each process its own.")
        for host, port in addresses:
            if not 0 < port < 2**16 or not host:
                fix = "Choose a free port for each process, or use `Job.current()`."
                raise value_error("addresses", got=f"{host}:{port}", wanted="a host and a port below 65536", fix=fix)
        if len(set(addresses)) != len(addresses):
            raise value_error("addresses", got=addresses, wanted="one for each process", fix="Make them differ.")
        if not isinstance(self.secret, bytes) or len(self.secret) < 16:
            got = f"{len(self.secret)} bytes" if isinstance(self.secret, bytes) else type(self.secret).__name__
            raise value_error("secret", got=got, wanted="bytes, 16 or more", fix="Use `secrets.token_bytes(32)`.")

    @classmethod
    def current(cls, host: str | None = None) -> "Job":
        """The processes of `jax.distributed`. All of them must call it together; it makes a secret and finds ports.

        Args:
          host: the name or address by which the others reach this process. None: `GEAR_JAX_HOST`, else the address
            from which this machine reaches JAX's coordinator, if `JAX_COORDINATOR_ADDRESS` says where that is, else
            what its own name stands for.
        """
        import jax
        import numpy as np
        from jax.experimental import multihost_utils

        rank, processes = jax.process_index(), jax.process_count()
        host = host or os.environ.get("GEAR_JAX_HOST") or _own_address(processes)
        port = _control.reserve(host)
        row = np.zeros(_HOST_BYTES + 2 + _SECRET_BYTES, np.uint8)
        name = host.encode()[:_HOST_BYTES]
        row[: len(name)] = np.frombuffer(name, np.uint8)
        row[_HOST_BYTES : _HOST_BYTES + 2] = divmod(port, 256)
        row[_HOST_BYTES + 2 :] = np.frombuffer(secrets.token_bytes(_SECRET_BYTES), np.uint8)
        rows = np.asarray(multihost_utils.process_allgather(row)).reshape(processes, -1)
        addresses = tuple(
            (bytes(r[:_HOST_BYTES]).rstrip(b"\0").decode(), int(r[_HOST_BYTES]) * 256 + int(r[_HOST_BYTES + 1]))
            for r in rows
        )
        return cls(rank, addresses, bytes(rows[0][_HOST_BYTES + 2 :]))


def _own_address(processes: int) -> str:
    if processes == 1:
        return "127.0.0.1"
    coordinator, _, port = os.environ.get("JAX_COORDINATOR_ADDRESS", "").rpartition(":")
    if coordinator and port.isdecimal():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing
            try:
                probe.connect((coordinator, int(port)))
                return probe.getsockname()[0]
            except OSError:
                pass
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        fix = "Set GEAR_JAX_HOST to the address by which the other processes reach this one."
        raise value_error("host", got=repr(socket.gethostname()), wanted="a name that resolves", fix=fix) from None
