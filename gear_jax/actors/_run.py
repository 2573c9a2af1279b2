"""The process of an actor that `ActorPool` starts. No jax in here."""

import os
import pickle
import runpy
import signal
import sys
import threading
import traceback
import types
from typing import Any

from gear_jax import _env


def main(payload: int, lifeline: int, words: int) -> None:
    """Runs what the pool has packed.

    Args:
      payload: descriptor of the file with the packed target.
      lifeline: of a pipe that ends when the pool's process does.
      words: of the file for a traceback.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all processes of a terminal; the pool ends this one
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    try:
        with open(f"/proc/self/fd/{payload}", "rb") as file:
            packed = pickle.load(file)
        _work(packed)
    except Exception:
        os.pwrite(words, traceback.format_exc().encode(), 0)
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # threads of an environment may hang while the interpreter shuts down


def _end_with(lifeline: int) -> None:
    # Nobody writes: what comes is the end.
    os.read(lifeline, 1)
    os._exit(0)


def _work(packed: dict[str, Any]) -> None:
    sys.path[:] = packed["path"]
    if packed["main"] is not None:
        # As in multiprocessing's spawn: the file is read again, but not as "__main__", so its last lines do not run.
        module = types.ModuleType("__mp_main__")
        module.__dict__.update(runpy.run_path(packed["main"], run_name="__mp_main__"))
        sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    target, args = pickle.loads(packed["work"])
    from gear_jax.actors._errors import RingClosedError
    from gear_jax.actors._writer import Writer

    with Writer(packed["ring"], _env.actor(), packed["timeout"]) as writer:
        try:
            target(writer, *args)
        except RingClosedError:
            pass  # the learner is done, and so is the actor
