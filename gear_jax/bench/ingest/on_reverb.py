"""dm-reverb with actors in other processes, in its own environment. Prints a line of JSON.

    PYTHON on_reverb.py serve ACTORS SECONDS VARIANT    the server, and its actors
    PYTHON on_reverb.py act PORT ACTOR VARIANT          one actor, until it is ended

VARIANT "trajectory": an element is a whole trajectory, so that the server never joins chunks. "step": an element is a
step, as an actor has it; an item is the last 20.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

import reverb
import tensorflow as tf

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import source

_TABLE = "table"
_IN_FLIGHT = 4  # items an actor sends before it waits, as many as a ring has slots for it
_START_SECONDS = 60


def act(port: int, actor: int, variant: str) -> None:
    """Writes at full rate."""
    columns = source.trajectories(actor)
    steps = columns["action"].shape[1]
    whole = variant == "trajectory"
    client = reverb.Client(f"localhost:{port}")
    with client.trajectory_writer(num_keep_alive_refs=1 if whole else steps) as writer:
        count = 0
        while True:
            for i in range(source.EACH):
                for t in range(1 if whole else steps):
                    writer.append({name: x[i] if whole else x[i, t] for name, x in columns.items()})
                last = {name: x[-1:] if whole else x[-steps:] for name, x in writer.history.items()}
                writer.create_item(_TABLE, 1.0, last)
                count += 1
                if count % _IN_FLIGHT == 0:
                    writer.flush()


def serve(actors: int, seconds: float, variant: str) -> float:
    """Bytes a second that reach the table."""
    w = source.workload()
    width = (1, w.steps) if variant == "trajectory" else (w.steps,)
    table = reverb.Table(
        _TABLE,
        sampler=reverb.selectors.Uniform(),
        remover=reverb.selectors.Fifo(),
        max_size=w.stored,
        rate_limiter=reverb.rate_limiters.MinSize(1),
        signature={c.name: tf.TensorSpec((*width, *c.shape), c.dtype, c.name) for c in w.columns},
    )
    server = reverb.Server([table], port=None)
    client = reverb.Client(f"localhost:{server.port}")
    words = [sys.executable, __file__, "act", str(server.port)]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the actors end with it
    processes = [subprocess.Popen([*words, str(i), variant], stdin=subprocess.DEVNULL) for i in range(actors)]
    try:
        until = time.monotonic() + _START_SECONDS
        while _inserted(client) < w.stored:
            if time.monotonic() > until or any(p.poll() is not None for p in processes):
                raise TimeoutError(f"the actors do not start: {_inserted(client)} items")
            time.sleep(0.05)
        first, begin = _inserted(client), time.perf_counter()
        time.sleep(seconds)
        n, spent = _inserted(client) - first, time.perf_counter() - begin
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait(30)
        server.stop()
    return n * w.steps * w.step_bytes / spent


def _inserted(client: reverb.Client) -> int:
    return client.server_info()[_TABLE].rate_limiter_info.insert_stats.completed


if __name__ == "__main__":
    if sys.argv[1] == "act":
        act(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    else:
        print(json.dumps({"rate": serve(int(sys.argv[2]), float(sys.argv[3]), sys.argv[4])}), flush=True)
        os._exit(0)  # its threads may hang while the interpreter shuts down
