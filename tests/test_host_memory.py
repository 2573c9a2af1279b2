"""XLA's pool of page-locked memory, as the environment sets it, and what machines and containers have left."""

import re

import pytest

from gear_jax import _host_memory as memory
from gear_jax._host_memory import GIB, LIMIT, PREALLOCATE, Pool

MIB = 1 << 20


@pytest.mark.parametrize(
    ("environ", "gib", "preallocated"),
    [
        ({}, 64, False),
        ({LIMIT: "200"}, 200, False),
        ({LIMIT: "plenty"}, 64, False),
        ({LIMIT: ""}, 64, False),
        ({PREALLOCATE: "true"}, 16, True),
        ({PREALLOCATE: "1", LIMIT: "80"}, 80, True),
        ({PREALLOCATE: "false"}, 64, False),
    ],
)
def test_the_pool_of_an_environment(environ, gib, preallocated):
    assert memory.pool(environ) == Pool(gib * GIB, preallocated)


@pytest.mark.parametrize(
    ("sizes", "limit", "taken"),
    [
        ([], 64 * GIB, 0),
        ([1], 64 * GIB, 2 * MIB),
        ([3 * MIB], 64 * GIB, 4 * MIB),  # a region of the next power of two
        ([MIB, MIB // 2], 64 * GIB, 2 * MIB),  # its rest serves the next
        ([3 * MIB, MIB // 2], 64 * GIB, 4 * MIB + 4 * MIB),  # unless it is too little to be split off
        ([2 * MIB, 2 * MIB, 2 * MIB], 64 * GIB, 2 * MIB + 4 * MIB),  # each region is twice the last one
        ([40 * GIB], 64 * GIB, 64 * GIB),
        ([40 * GIB], 41 * GIB, 41 * GIB),  # the limit holds it back
        ([64 * GIB], 64 * GIB, 64 * GIB),
        ([64 * GIB + 1], 64 * GIB, None),
        ([40 * GIB, 24 * GIB], 64 * GIB, 64 * GIB),
        ([24 * GIB, 40 * GIB], 64 * GIB, None),  # the first one's region takes 32
        ([2 * MIB - 1] * 2, 2 * MIB, None),
    ],
)
def test_what_a_pool_locks(sizes, limit, taken):
    assert memory.locked(sizes, Pool(limit)) == taken


def test_a_preallocated_pool_is_one_region():
    assert memory.locked([24 * GIB, 40 * GIB], Pool(64 * GIB, preallocated=True)) == 64 * GIB
    assert memory.locked([24 * GIB, 41 * GIB], Pool(64 * GIB, preallocated=True)) is None


def test_arrays_are_made_in_the_order_that_locks_less():
    assert memory.order([24 * GIB, 40 * GIB], Pool(64 * GIB)) == [1, 0]
    assert memory.order([40 * GIB, 30 * GIB], Pool(72 * GIB)) == [1, 0]
    assert memory.order([40 * GIB, 30 * GIB], Pool(10 * GIB)) == [0, 1]  # neither fits
    assert memory.order([], Pool(GIB)) == []


@pytest.mark.parametrize("sizes", [[100 * GIB], [33 * GIB] * 3, [40 * GIB, 30 * GIB], [5], [7 * GIB + 1] * 20])
def test_the_limit_that_is_named_is_enough_and_the_least_is_the_least(sizes):
    least, roomy = memory.limit_for(sizes)

    def fits(gib):
        pool = Pool(gib * GIB)
        return memory.locked([sizes[i] for i in memory.order(sizes, pool)], pool) is not None

    assert fits(least) and fits(roomy) and least < roomy
    assert not any(fits(gib) for gib in range(least))


@pytest.mark.parametrize(
    ("environ", "available", "said"),
    [
        ({}, 500, rf"got XLA's limit of 64 GiB for each GPU, wanted 100 GiB.*Set {LIMIT}=106 before jax starts"),
        ({LIMIT: "99"}, 500, f"limit of 99 GiB.*{LIMIT}=106"),
        ({LIMIT: "100"}, 500, None),
        ({LIMIT: "106"}, None, None),
        ({LIMIT: "106"}, 99, r"got 99 GiB of host memory.*wanted 100 GiB, the table's columns\. Lower TableSpec\.cap"),
        ({}, 99, "got 99 GiB of host memory"),
        ({LIMIT: "200"}, 110, f"a pool of XLA's that grows to 128 GiB.*wanted at most 110 GiB.*{LIMIT}=100 before"),
        ({LIMIT: "200"}, 128, None),
        ({LIMIT: "200", PREALLOCATE: "1"}, 5, None),
        ({PREALLOCATE: "1"}, 500, f"limit of 16 GiB.*{LIMIT}=106"),
    ],
)
def test_a_table_of_100_gib(environ, available, said):
    sizes = [60 * GIB, 40 * GIB] if available is None else [100 * GIB]
    got = memory.problem(sizes, "gpu", environ, None if available is None else available * GIB)
    assert got is None if said is None else re.search(said, got or "")


def test_on_a_cpu_nothing_is_page_locked():
    assert memory.problem([100 * GIB], "cpu", {}, GIB) is None


def files(root, tree):
    for name, text in tree.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal:  9000000 kB\nMemFree:  1000 kB\nMemAvailable:    8388608 kB\n"}
V2 = "sys/fs/cgroup"
V1 = "sys/fs/cgroup/memory"


@pytest.mark.parametrize(
    ("tree", "gib"),
    [
        (MEMINFO, 8),
        ({}, None),
        # Version 2, in a container of its own name space; file pages that can be dropped are free.
        (
            {**MEMINFO, "proc/self/cgroup": "0::/\n", f"{V2}/memory.max": f"{6 * GIB}\n",
             f"{V2}/memory.current": f"{5 * GIB}", f"{V2}/memory.stat": f"anon 1\ninactive_file {2 * GIB}\n"},
            3,
        ),
        ({**MEMINFO, "proc/self/cgroup": "0::/\n", f"{V2}/memory.max": "max\n", f"{V2}/memory.current": "5"}, 8),
        # A group that is limited by one above it.
        (
            {**MEMINFO, "proc/self/cgroup": "0::/a/b\n", f"{V2}/a/memory.max": f"{4 * GIB}",
             f"{V2}/a/memory.current": f"{GIB}", f"{V2}/a/b/memory.max": f"{7 * GIB}", f"{V2}/a/b/memory.current": "0"},
            3,
        ),
        # Version 1, and a path of the host's that the container does not see.
        (
            {**MEMINFO, "proc/self/cgroup": "9:name=systemd:/x\n4:cpu,memory:/docker/77\n",
             f"{V1}/memory.limit_in_bytes": f"{5 * GIB}", f"{V1}/memory.usage_in_bytes": f"{GIB}",
             f"{V1}/memory.stat": "total_inactive_file 0\n"},
            4,
        ),
        (
            {**MEMINFO, "proc/self/cgroup": "4:memory:/\n", f"{V1}/memory.limit_in_bytes": "9223372036854771712",
             f"{V1}/memory.usage_in_bytes": "77"},
            8,
        ),
        ({**MEMINFO, "proc/self/cgroup": "nonsense\n"}, 8),
        # More is in use than the limit allows.
        ({**MEMINFO, "proc/self/cgroup": "0::/\n", f"{V2}/memory.max": "7", f"{V2}/memory.current": "9"}, 0),
    ],
)  # fmt: skip
def test_what_is_available(tmp_path, tree, gib):
    assert memory.available(files(tmp_path, tree)) == (None if gib is None else gib * GIB)


def test_the_limits_of_a_container_are_named(tmp_path):
    tree = {"proc/self/cgroup": "0::/job\n", f"{V2}/job/memory.max": "100", f"{V2}/job/memory.current": "40"}
    root = files(tmp_path, tree)
    assert memory.groups(root) == [memory.Group(root / V2 / "job", 100, 60)]


def test_this_machine():
    assert (memory.available() or 1) > 0


def test_human():
    assert [memory.human(x) for x in (0, 1023, 1536, 2**40)] == ["0 B", "1023 B", "1.5 KiB", "1 TiB"]
