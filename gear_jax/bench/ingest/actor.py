"""An actor that writes at full rate. NumPy only."""

from gear_jax.actors import Writer
from gear_jax.bench.ingest import source


def write(writer: Writer) -> None:
    """Appends S5's steps one by one, and commits every 20, until the ring is closed."""
    columns = source.trajectories(writer.actor)
    rows = [
        [{name: column[i, t] for name, column in columns.items()} for t in range(writer.ring.steps)]
        for i in range(source.EACH)
    ]
    while True:
        for steps in rows:
            for step in steps:
                writer.append(step)
            writer.commit()
