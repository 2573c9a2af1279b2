"""Other processes' memory, read one-sidedly: who takes part, how they meet, what they read. jax only in `Job.current`.

A `Job` names the processes and their secret; a `Session` exposes memory of this process read-only to them and reads
theirs. Rows of a table travel by `gear_jax.ops`, which finds a session by its number.
"""

from gear_jax.transport._errors import MalformedError, TransportError
from gear_jax.transport._exposer import Exposer
from gear_jax.transport._job import Job
from gear_jax.transport._kinds import KINDS, missing
from gear_jax.transport._session import Session

__all__ = ["KINDS", "Exposer", "Job", "MalformedError", "Session", "TransportError", "missing"]
