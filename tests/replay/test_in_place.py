"""What XLA makes of programs that sample, update, add and append: nothing of a column's or the index's size moves."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gear_jax as gear
from gear_jax.ops import _hlo
from gear_jax.replay import _in_place
from gear_jax.selectors import LowestPriority, Permutation, Prioritized, Uniform
from gear_jax.testing.ops import assert_calls_in_place, column_sized, to_numpy

C, T, B = 16_384, 3, 4
KEY = jax.random.key(0)
COLUMNS = {"a": gear.ColumnSpec((5,), jnp.float32), "b": gear.ColumnSpec((), jnp.int32)}
VALUES = {"a": jnp.ones((2, T, 5), jnp.float32), "b": jnp.ones((2, T), jnp.int32)}
TWO = jnp.full((2,), T, jnp.int32)
TABLE = gear.TableSpec(COLUMNS, T, C)
WINDOW = gear.Window(-1, 2)


def sample(replay, state, key):
    state, s = replay.sample(state, key, B)
    return state, s.data


def update(replay, state, key):
    state, s = replay.sample(state, key, B)
    return replay.update_priorities(state, s.handles, s.probability), s.weight


def add(replay, state, key):
    state, handles = replay.add(state, VALUES, TWO, jax.random.uniform(key, (2,)))
    return replay.update_priorities(state, handles, jnp.ones(2, jnp.float32)), handles


def append(replay, state, key):
    step = jax.tree.map(lambda x: x[:, 0], VALUES)
    return replay.append(state, jnp.arange(2, dtype=jnp.int32), step, jax.random.bernoulli(key, shape=(2,)))


def program(replay, parts):
    def run(state, key):
        outs = []
        for part in parts:
            state, out = part(replay, state, key)
            outs.append(out)
        return state, outs

    return run


def in_scan(f):
    return lambda state, key: jax.lax.scan(f, state, jax.random.split(key, 3))


def in_cond(f):
    return lambda state, key: jax.lax.cond(key_is_odd(key), lambda s: f(s, key)[0], lambda s: s, state)


def key_is_odd(key):
    return jax.random.bits(key) % jnp.uint32(2) == 1


def replay_for(selector, partitions=1, **options):
    return gear.make_replay(TABLE, selector, WINDOW, partitions=partitions, **options)


def assert_nothing_moves(f, state, index=True):
    """Nothing as large as a column is made, nor (with `index`) as the smallest array that grows with the table."""
    gear.assert_in_place(f, state, KEY)
    text = jax.jit(f, donate_argnums=0).lower(state, KEY).compile().as_text()
    assert_calls_in_place(text, state.columns, jax.default_backend())
    large = jax.tree.leaves(state.columns)
    if index:
        large += [state.length, state.priority, state.sums, state.sequence, state.generation]
    assert column_sized(text, min(x.nbytes for x in large)) == []


@pytest.mark.parametrize(
    "order", list(itertools.permutations([sample, update, add])), ids=lambda o: "-".join(f.__name__ for f in o)
)
def test_every_order(order, memory):
    replay = replay_for(Prioritized(), memory=memory)
    assert_nothing_moves(program(replay, order), replay.init())


@pytest.mark.parametrize("around", [in_scan, in_cond])
@pytest.mark.parametrize("partitions", [1, 2])
def test_scan_and_cond(around, partitions, memory):
    replay = replay_for(Prioritized(), partitions, streams=2, memory=memory)
    assert_nothing_moves(around(program(replay, [sample, append, update, add, sample])), replay.init())


@pytest.mark.parametrize("selector", [Uniform(), Permutation()])
def test_other_selectors(selector):
    replay = replay_for(selector, streams=2)
    f = in_scan(program(replay, [append, sample, add, sample]))
    # A permutation ranks the whole index.
    assert_nothing_moves(f, replay.init(), index=isinstance(selector, Uniform))


def test_no_column_moves_where_a_policy_ranks_the_whole_table():
    replay = replay_for(Prioritized(), 2, eviction=LowestPriority())
    assert_nothing_moves(in_scan(program(replay, [add, update, add])), replay.init(), index=False)


def test_a_jitted_step_is_taken_as_it_is():
    replay = replay_for(Prioritized())
    f = program(replay, [sample, add])
    state = replay.init()
    gear.assert_in_place(jax.jit(f, donate_argnums=0), state, KEY)
    with pytest.raises(ValueError, match=r"assert_in_place: column '[ab]': got `.*Donate the state"):
        gear.assert_in_place(jax.jit(f), state, KEY)


def test_an_old_state_that_is_used_again_is_found():
    replay = replay_for(Prioritized())

    def fork(state, key):
        new, _ = add(replay, state, key)
        _, data = sample(replay, state, key)  # the state from before
        return new, data

    with pytest.raises(ValueError, match=r"assert_in_place: column '[ab]'.*use each state once"):
        gear.assert_in_place(fork, replay.init(), KEY)


# What JAX's own operations make of columns is found before it runs: on a GPU, in the device's memory, where they may.


def test_a_shared_table_under_vmap_is_found():
    replay = replay_for(Prioritized(), memory="device")
    keys = jax.random.split(KEY, 3)

    def many(state, keys):
        return jax.vmap(lambda k: sample(replay, state, k))(keys)

    warned = pytest.warns(UserWarning, match="donated buffers were not usable")
    with warned, pytest.raises(ValueError, match=r"assert_in_place: column '[ab]'.*scan instead of vmap"):
        gear.assert_in_place(many, jax.eval_shape(replay.init), keys)
    # Drawing the data alone under vmap reads the shared table where it is.
    gear.assert_in_place(
        lambda s, k: (jax.vmap(lambda k: sample(replay, s, k)[1])(k), s), jax.eval_shape(replay.init), keys
    )
    many_rows = jax.tree.map(lambda x: jnp.stack([x] * 3), VALUES)
    with pytest.raises(ValueError, match="under vmap: columns: got a table that is not batched"):
        jax.eval_shape(
            lambda s, v: jax.vmap(lambda v: replay.add(s, v, TWO))(v), jax.eval_shape(replay.init), many_rows
        )


def test_a_column_that_the_user_rewrites_is_found_by_name():
    replay = replay_for(Prioritized(), memory="device")

    def scaled(state, key):
        state, _ = add(replay, state, key)
        return state.replace(columns={**state.columns, "a": state.columns["a"] * 2})

    with pytest.raises(ValueError, match="column 'a'"):
        gear.assert_in_place(scaled, jax.eval_shape(replay.init), KEY)


def test_nothing_runs(make):
    replay = make(Prioritized())
    state = replay.init()
    gear.assert_in_place(lambda s, k: replay.sample(s, k, 6), state, KEY)
    assert not state.ticket.is_deleted()


def test_the_memory_stays_through_a_training_loop(memory):
    replay = replay_for(Prioritized(), memory=memory)
    state = replay.init()
    before = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state.columns)]
    run = jax.jit(in_scan(program(replay, [add, update, sample])), donate_argnums=0)
    for i in range(3):
        state, _ = run(state, jax.random.key(i))
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state.columns)] == before
    assert replay.stats(state)["inserted"] == 18
    np.testing.assert_array_equal(to_numpy(state.columns)["a"][0, :18], 1)


ORDERS = ["SAS", "ASAS", "SASA", "SUAS", "ASUAS", "ASASAS", "USAUS", "SUSAUSA"]


@pytest.mark.parametrize(
    ("program", "memory"),
    [*[(order, "device") for order in ORDERS], ("ASAS", "pinned_host"), ("SUSAUSA", "pinned_host")],
)
def test_a_branch_of_cond_is_in_place_in_any_order(program, memory):
    """S samples, A adds, U updates. With ops alone such a branch needs `ops.seal`."""
    table = gear.TableSpec({"x": gear.ColumnSpec((3,), jnp.float32)}, trajectory_length=5, capacity=64)
    replay = gear.make_replay(table, gear.selectors.Prioritized(), memory=memory)
    rows, lengths = {"x": jnp.ones((2, 5, 3))}, jnp.full((2,), 5, jnp.int32)

    def branch(state):
        batches, last = [], None
        for i, call in enumerate(program):
            if call == "S":
                state, last = replay.sample(state, jax.random.key(i), 4)
                batches.append(last.data["x"])
            elif call == "A":
                state, _ = replay.add(state, rows, lengths)
            elif last is not None:
                state = replay.update_priorities(state, last.handles, last.probability)
        return state, jnp.stack(batches)

    def step(state, flag):
        nothing = jnp.zeros((program.count("S"), 4, 5, 3))
        return jax.lax.cond(flag, branch, lambda state: (state, nothing), state)

    state, _ = replay.add(replay.init(), rows, lengths)
    gear.assert_in_place(step, state, True)
    gear.assert_in_place(lambda state, flags: jax.lax.scan(step, state, flags), state, jnp.ones(3, bool))


def test_weights_that_look_like_a_column_are_not_one():
    table = gear.TableSpec({"x": gear.ColumnSpec((), jnp.float32)}, trajectory_length=1, capacity=256)
    replay = gear.make_replay(table)

    def step(state, weights, key):  # a column is float32[1, 256, 1]
        state, batch = replay.sample(state, key, 4)
        return state, weights * (1 + batch.data["x"].mean()), jnp.sin(weights[0])

    gear.assert_in_place(step, replay.init(), jnp.ones((4, 256)), KEY)


def test_states_given_by_name_are_donated():
    replay = replay_for(Prioritized())
    f = program(replay, [sample, add])
    state = replay.init()
    gear.assert_in_place(f, state=state, key=KEY)
    gear.assert_in_place(lambda key, **others: f(others["state"], key), KEY, state=state)

    def both(one, key, *, two):
        return f(one, key), f(two, key)

    gear.assert_in_place(both, state, KEY, two=replay.init())
    gear.assert_in_place(jax.jit(f, donate_argnames="state"), state=state, key=KEY)
    with pytest.raises(ValueError, match=r"column '[ab]'"):
        gear.assert_in_place(jax.jit(f), state=state, key=KEY)


def test_columns_sorted_together_are_found():
    table = gear.TableSpec({"x": gear.ColumnSpec((), jnp.float32)}, 4, 64)
    replay = gear.make_replay(table, memory="device")

    def step(state):
        order = jax.lax.broadcasted_iota(jnp.int32, state.columns["x"].shape, 1)
        keys, order = jax.lax.sort((state.columns["x"], order), dimension=1, num_keys=1)
        return state, keys.sum(), order[0, :, 0].sum()

    with pytest.raises(ValueError, match=r"column 'x': got `(sort|fusion)`"):
        gear.assert_in_place(step, jax.eval_shape(replay.init))


COLUMN = {("f32", (1, 8, 4, 3)): "x"}
LAYOUTS = ["{3,2,1,0:T(8,128)}", "{3,2,1,0:S(5)}", "{3,2,1,0:T(8,128)S(5)}", "{3,2,1,0}", ""]


@pytest.mark.parametrize(
    ("instruction", "found"),
    [
        ("COLUMN copy(%p)", True),
        ("f32[5,1,8,4,3]{4,3,2,1,0} broadcast(%p), dimensions={1,2,3,4}", True),
        ("f32[8,4,3]{2,1,0} copy(%p)", False),
        ("f32[1,8,4,3,1]{4,3,2,1,0} copy(%p)", False),
        ("f16[1,8,4,3]{3,2,1,0} convert(%p)", False),
        ("(s32[4]{0}, COLUMN) fusion(%p), kind=kLoop, calls=%fused", True),
        ("(s32[4]{0}, s32[9]{0}, /*index=2*/COLUMN) sort(%p, %q), to_apply=%less", True),
        ("(COLUMN, f32[2]{0}) all-gather(%p, %q), dimensions={0}", True),
        ("((f32[1]{0}, f32[1]{0}), (f32[2]{0}, COLUMN)) all-gather-start(%p, %q)", True),
        ("((COLUMN), f32[2]{0}, s32[]) fusion-start(%p), kind=kLoop, calls=%fused", False),
        ("((f32[2]{0}), COLUMN, s32[]) async-start(%p), calls=%other", True),
        ("(COLUMN, COLUMN, u32[]{:S(2)}) copy-start(%p)", True),
        ("(f32[2]{0}, COLUMN, u32[]) copy-start(%p)", False),
        ("(f32[2]{0}, COLUMN) all-reduce-start(%p, %q), to_apply=%add", True),
        ("(COLUMN, f32[1,8,4,3]{3,2,1,0}, u32[]) copy-start(f32[1,8,4,3]{3,2,1,0} %p)", True),
        ("((COLUMN), COLUMN, s32[]) async-start(%p), calls=%wrapped_copy", True),
        ("COLUMN async-done(%p)", False),
        ("COLUMN dynamic-update-slice(%p, %row, %i, %zero, %zero, %zero)", True),
        ("f32[1,1,4,3]{3,2,1,0} dynamic-slice(%p, %i), dynamic_slice_sizes={1,1,4,3}", False),
        ("COLUMN opt-barrier(%p)", False),
        ("COLUMN copy-done(%p)", False),
        ("(s32[], COLUMN) while(%p), condition=%c, body=%b", False),
        ("(s32[], COLUMN) tuple(%p, %q)", False),
        ("COLUMN get-tuple-element(%p), index=1", False),
        ('(COLUMN, s32[1]{0}) custom-call(%p), custom_call_target="gear_gather"', False),
        ('(s32[1]{0}, COLUMN) custom-call(%p), custom_call_target="sort"', True),
        ('(s32[], COLUMN) custom-call(%p), custom_call_target="f", output_to_operand_aliasing={{1}: (0, {})}', False),
        ('(COLUMN, COLUMN) custom-call(%p), custom_call_target="f", output_to_operand_aliasing={{1}: (0, {})}', True),
        ('COLUMN custom-call(%p), custom_call_target="f", output_to_operand_aliasing={{}: (0, {})}', False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("layout", LAYOUTS)
def test_which_instructions_move_a_column(instruction, found, layout):
    line = f"  ROOT %x.1 = {instruction.replace('COLUMN', 'f32[1,8,4,3]' + layout)}"
    got = set(_in_place.column_sized(line, COLUMN))
    assert bool(got) == found
    assert all(name == "x" and f" {opcode}(" in line for opcode, name, line in got)


def test_what_a_fusion_holds_makes_no_array():
    fusion = "%fused (p: f32[1,8,4,3]) -> f32[] {\n  %y = COLUMN multiply(%p, %p)\n}\n"
    entry = "ENTRY %main (p: f32[1,8,4,3]) -> f32[] {\n  ROOT %z = f32[]{} KIND(%p), calls=%fused\n}\n"
    text = (fusion + entry).replace("COLUMN", "f32[1,8,4,3]{3,2,1,0:S(5)}")
    for kind, count in (("fusion", 0), ("call", 1)):
        assert len(list(_in_place.column_sized(text.replace("KIND", kind), COLUMN))) == count


@pytest.mark.parametrize("predicate", [True, False])
def test_what_stands_in_for_a_cond_with_work_in_both_branches(predicate):
    """`add` with lengths of 0 and `update_priorities` with slots of -1 do nothing, and are in place."""
    table = gear.TableSpec({"x": gear.ColumnSpec((3,), jnp.float32)}, trajectory_length=5, capacity=64)
    replay = gear.make_replay(table, gear.selectors.Prioritized())
    rows, lengths = {"x": jnp.ones((2, 5, 3))}, jnp.full((2,), 5, jnp.int32)
    state, _ = replay.add(replay.init(), rows, lengths)

    def step(state, flag):
        state, batch = replay.sample(state, jax.random.key(0), 4)
        handles = batch.handles.replace(slot=jnp.where(flag, batch.handles.slot, -1))
        state = replay.update_priorities(state, handles, jnp.full((4,), 2.0))
        return replay.add(state, rows, jnp.where(flag, 0, lengths))[0]

    gear.assert_in_place(step, state, predicate)
    state = jax.jit(step, donate_argnums=0)(state, predicate)
    stats = replay.stats(state)
    assert stats["stale_updates"] == 0
    assert (stats["trajectories"], stats["max_priority"]) == ((2, 2.0) if predicate else (4, 1.0))


def test_a_state_of_another_selector_is_refused():
    table = gear.TableSpec({"x": gear.ColumnSpec((), jnp.float32)}, 5, 8)
    uniform, permutation = gear.make_replay(table), gear.make_replay(table, Permutation())
    for replay, state in ((permutation, uniform.init()), (uniform, permutation.init())):
        with pytest.raises(ValueError, match="sample: state: got the state of another selector"):
            replay.sample(state, jax.random.key(0), 2)


def test_lengths_of_64_bits_do_not_wrap():
    replay = gear.make_replay(gear.TableSpec({"x": gear.ColumnSpec((), jnp.float32)}, 5, 8))
    state, _ = replay.add(replay.init(), {"x": np.ones((4, 5), np.float32)}, np.array([2**32 + 1, 2**40, 2, -(2**40)]))
    assert state.length.reshape(-1)[:4].tolist() == [5, 5, 2, 0]


GPU_PROGRAM = """
ENTRY %main.9 (column: f32[1,8,4,3], slots: s32[2]) -> (f32[2,4,3], f32[1,8,4,3]) {
  %column.1 = f32[1,8,4,3]{3,2,1,0:S(5)} parameter(0)
  %slots.1 = s32[2]{0} parameter(1)
  %copy-start = (f32[1,8,4,3]{3,2,1,0}, f32[1,8,4,3]{3,2,1,0:S(5)}, u32[]) copy-start(%column.1)
  %copy-done = f32[1,8,4,3]{3,2,1,0} copy-done(%copy-start)
  %read = (f32[2,4,3]{2,1,0}, s32[1]{0}) custom-call(%slots.1, OPERAND), custom_call_target="gear_gather", backend_config={}
  %ticket = s32[1]{0} get-tuple-element(%read), index=1
  %write = f32[1,8,4,3]{3,2,1,0:S(5)} custom-call(%slots.1, /*index=1*/%column.1, %ticket), custom_call_target="gear_scatter", output_to_operand_aliasing={{}: (1, {})}
  ROOT %tuple = (f32[2,4,3]{2,1,0}, f32[1,8,4,3]{3,2,1,0:S(5)}) tuple(%read, %write)
}
"""  # noqa: E501


@pytest.mark.parametrize(
    ("operand", "moved"),
    [
        ("%column.1", False),
        ("column.1", False),
        ("f32[1,8,4,3]{3,2,1,0:S(5)} %column.1", False),
        ("%copy-done", True),
        ("%elsewhere", False),
    ],
)
def test_a_call_on_a_copy_of_a_column_in_host_memory_is_found(operand, moved):
    text = GPU_PROGRAM.replace("OPERAND", operand)
    got = list(_in_place.moved(text, COLUMN))
    assert [(target, name) for target, name, _ in got] == [("gear_gather", "x")] * moved
    assert len(_hlo.calls(text)) == 2 and _hlo.calls(text)[1].aliased


def test_assertions_on_the_calls_of_a_program():
    table = gear.TableSpec({"x": gear.ColumnSpec((3,), jnp.float32)}, 4, 8)
    column = gear.make_replay(table, memory="pinned_host").init().columns
    good = GPU_PROGRAM.replace("OPERAND", "%column.1")
    assert_calls_in_place(good, column, "gpu")
    with pytest.raises(AssertionError, match=r"gear_gather: column \['x'\] is not in host memory"):
        assert_calls_in_place(GPU_PROGRAM.replace("OPERAND", "%copy-done"), column, "gpu")
    with pytest.raises(AssertionError, match="gear_scatter writes a copy"):
        assert_calls_in_place(good.replace("output_to_operand_aliasing={{}: (1, {})}", "x={}"), column, "gpu")
    with pytest.raises(AssertionError, match="no call gets a column"):
        assert_calls_in_place("", column, "gpu")
