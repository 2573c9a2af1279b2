"""`doctor` and the rings in shared memory."""

import gear_jax as gear
from gear_jax import cli
from gear_jax.actors import make_ring
from gear_jax.cli import _doctor_rings


def test_rings_of_the_dead_are_listed_and_removed(shm, capsys):
    table = gear.TableSpec({"x": gear.ColumnSpec((), "int32")}, 1, 1)
    assert _doctor_rings.report().strip() == "none"
    held = make_ring(table, 1, name="held", directory=shm)
    dead = make_ring(table, 1, name="dead", directory=shm)
    name = dead.path
    del dead
    text = _doctor_rings.report()
    assert "held  8 KiB  held by process" in text
    assert "dead  8 KiB  no living process holds it: `python -m gear_jax doctor --clean-shm` removes it" in text
    assert cli.main(["doctor", "--clean-shm"]) == 0
    assert capsys.readouterr().out == f"removed {name}\n1 ring(s) removed, 1 in use\n"
    held.unlink()
    assert cli.main(["doctor", "--clean-shm"]) == 0
    assert capsys.readouterr().out == "0 ring(s) removed, 0 in use\n"
