"""Every row on this machine's backend, with tables of a few KB."""

import dataclasses
import json
import sys

import jax.numpy as jnp
import pytest

from gear_jax import ops
from gear_jax.bench.gpu import rows, run, sizes
from gear_jax.bench.gpu.bench import Reads

TINY = dataclasses.replace(sizes.TINY, rounds=1)
# What each row must say something about: the beginnings of its targets.
TARGETS = {
    "memory": ["HBM used by a sample"],
    "small_rows": ["random rows of 1 KiB", "random rows of 256 B"],
    "gather": ["gather, random rows from 4 KiB"],
    "windows": ["Decision-Transformer windows"],
    "trajectories": [
        "trajectories of 60 KB",
        "trajectories of 12 MB",
        "ops.gather in a scan",
        "replay.sample in a scan",
    ],
    "engine": ["copy engines, windows from 1 MiB in batches from 256 MiB"],
    "latency": ["sample (uniform select"],
    "priorities": ["prioritised, N = 3,000, B = 512: sample", "prioritised, N = 3,000, B = 512: update"],
    "hbm": ["HBM table"],
    "misaligned": ["misaligned steps"],
    "peers": ["against JAX's own host gather", "against NumPy indexing + device_put"],
    "insert": ["in-place insert"],
    "guard": ["a step that samples and inserts"],
    "mesh": [
        "centralized sample with exchange, 2 devices",
        "samples out of the whole table, 2 device(s)",
        "scaling to 2 against",
        "selection alone, prioritised",
    ],
    "remote": [
        "a fetch beside a matmul, same host",
        "a fetch beside a matmul, shared memory",
        "a fetch beside a matmul, TCP",
        "matmuls behind a fetch that waits",
    ],
    "training": ["train step with overlapped sampling"],
}


def _run(names, size=TINY):
    said, saved = [], []
    result = run.run(size, names, said.append, lambda found: saved.append(json.dumps(found)))
    return result, said, saved


@pytest.mark.parametrize("name", rows.NAMES)
def test_every_row_runs_and_speaks_about_its_targets(name):
    result, said, saved = _run([name])
    row = result["rows"][name]
    assert not {"wrong", "failed", "stopped"} & set(row), row
    whats = [target["what"] for target in row["targets"]]
    assert len(whats) == len(TARGETS[name])
    assert all(what.startswith(begin) for what, begin in zip(whats, TARGETS[name], strict=True))
    # Tables of this size say nothing about a target, and nothing stands beside a copy that was not measured.
    assert all(target["reached"] is None for target in row["targets"])
    assert all("ratio" not in figure for figure in row["figures"])
    assert all(figure["value"] == figure["value"] for figure in row["figures"])
    assert json.loads(saved[-1]) == json.loads(json.dumps(result))
    assert any(name in line for line in said)


def test_a_peer_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "flashbax", None)
    result, _, _ = _run(["priorities", "peers"])
    missing = {peer["name"] for row in result["rows"].values() for peer in row["peers"] if "missing" in peer}
    assert {"TorchRL, CUDA tree", "torch.multinomial", "flashbax in HBM"} <= missing
    assert all(
        "not installed" in peer["missing"]
        for row in result["rows"].values()
        for peer in row["peers"]
        if peer["name"] in missing
    )


def test_a_wrong_byte_ends_a_row_and_not_the_run(monkeypatch):
    real = ops.gather

    def wrong(*args, **kwargs):
        data, mask, ticket = real(*args, **kwargs)
        return {n: x.at[0].set(jnp.zeros_like(x[0])) for n, x in data.items()}, mask, ticket

    monkeypatch.setattr(ops, "gather", wrong)
    result, said, saved = _run(["gather", "windows"])
    assert "column 'x'" in result["rows"]["gather"]["wrong"]
    assert result["rows"]["windows"]["wrong"] and len(saved) == 2
    assert any("rows differ" in line for line in said)


def test_what_a_row_found_before_it_failed_is_kept(monkeypatch, capsys):
    def fails(self, calls=20):
        raise RuntimeError("out of memory\nin detail")

    monkeypatch.setattr(Reads, "single", fails)
    result, _, _ = _run(["gather", "latency"])
    row = result["rows"]["gather"]
    assert row["failed"].startswith("RuntimeError: out of memory") and row["figures"] and not row["targets"]
    assert "failed" not in result["rows"]["latency"]
    assert "out of memory" in capsys.readouterr().err


def test_the_limit_stops_what_is_left():
    result, _, _ = _run(["latency", "gather"], dataclasses.replace(TINY, limit=-1.0))
    assert all("--limit" in row["stopped"] for row in result["rows"].values())


def test_tables_go_when_no_later_row_needs_them(tiny):
    made = tiny.table("small")
    assert tiny.table("small") is made
    tiny.drop({"small", "main"})
    assert tiny.table("small") is not made


def test_a_table_that_was_taken_is_made_anew(tiny):
    taken = tiny.take("small")
    assert tiny.table("small") is not taken


def test_rows_run_in_an_order_in_which_they_can():
    names = list(rows.NAMES)
    assert names[0] == "memory" and names[-1] == "peers"
    assert all(names.index(other.name) > names.index("small_rows") for other in rows.ROWS if "windows" in other.tables)
    assert all(row.about.endswith(".") and "\n" not in row.about for row in rows.ROWS)


def test_windows_lie_inside_the_trajectories(tiny):
    layout, columns = tiny.layouts["windows"], tiny.table("windows")
    spans = dict.fromkeys(columns, (-4, 5))
    reads = Reads(tiny, layout, columns, 200, spans)
    starts = jnp.concatenate([starts for _, starts in reads.index])
    assert starts.min() == 4 and starts.max() == layout.steps - 1
    assert reads.size == 200 * 5 * layout.step_bytes()
    reads.check()


def test_whole_trajectories_start_at_zero(tiny):
    reads = Reads(tiny, tiny.layouts["main"], tiny.table("main"), 3)
    assert all((starts == 0).all() for _, starts in reads.index)
    reads.check()


def test_full_sizes_are_those_that_the_targets_ask_for():
    full = sizes.FULL
    assert full.small[0] * full.small[1] * 256 >= sizes.SPAN_BYTES
    assert full.windows[0] * full.windows[1] * 64 >= sizes.SPAN_BYTES
    assert min(full.batch_bytes) >= sizes.BATCH_BYTES and full.window_batch == 65_536
    assert full.inserted[0] * full.main[1] * full.cell_bytes >= sizes.BATCH_BYTES
    assert full.inserted[1] * full.windows[1] * 64 >= sizes.BATCH_BYTES
    assert full.priorities == (10**6, 10**7) and full.guard_slots * full.cell_bytes == sizes.GIB
    assert (full.short_batches[0], full.short_batches[-1]) == (32, 1024)
    assert full.limit == 240.0 and sizes.QUICK.limit == 40.0
