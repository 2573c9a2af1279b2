"""The benchmark: gear_jax beside other replay libraries, each in its own process, checked before it is timed.

`python -m gear_jax bench` calls `main`. This package uses the standard library and NumPy only; the libraries
are imported by the worker processes, which load this folder by path (see `worker`), so that none of them
needs gear_jax or JAX in its environment. `gpu` (`bench --device gpu`) is another benchmark, in one process with JAX.
"""

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark's command line.

    Args:
        argv: Arguments without the program's name; None takes `sys.argv[1:]`.

    Returns:
        The exit status: 0 where every engine that could run passed its checks, 1 where one gave a wrong batch
        or failed, 2 on a bad argument.
    """
    from .cli import run

    return run(argv)
