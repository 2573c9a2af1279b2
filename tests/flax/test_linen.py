"""LinenReplay: the table as a variable, in apply, jit, scan, grad, TrainState and checkpoints."""

from typing import Any

import flax
import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn
from flax.training import train_state

import gear_jax as gear
from gear_jax.flax import COLLECTION, LinenReplay

MUTABLE = [COLLECTION]


class Agent(nn.Module):
    """A model that learns from a table of its own."""

    replay: gear.Replay

    def setup(self):
        self.net = nn.Dense(1)
        self.table = LinenReplay(self.replay)

    def __call__(self, observation):
        self.table()
        return self.net(observation)[..., 0]

    def add(self, *args):
        return self.table.add(*args)

    def loss(self, batch_size):
        batch = self.table.sample(batch_size)
        error = jnp.square(self(batch.data["observation"]) - batch.data["reward"])
        self.table.update_priorities(batch.handles, jnp.mean(error, 1))
        return jnp.mean(error)


class TrainState(train_state.TrainState):
    replay: Any


def make_agent(replay):
    agent = Agent(replay)
    return agent, agent.init(jax.random.key(0), jnp.ones((1, 3)))


def make_step(agent):
    def step(state: TrainState, rows, key):
        _, changed = agent.apply({"params": state.params, "replay": state.replay}, *rows, method="add", mutable=MUTABLE)

        def loss(params):
            variables = {"params": params, **changed}
            return agent.apply(variables, 8, method="loss", mutable=MUTABLE, rngs={"replay": key})

        (value, after), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads).replace(replay=after["replay"]), value

    return step


def test_mirrors_replay(replay, make_rows, same):
    table = LinenReplay(replay)
    variables = table.init(jax.random.key(0))
    state = replay.init()
    rows, lengths = make_rows()
    key = jax.random.key(5)

    handles, variables = table.apply(variables, rows, lengths, method="add", mutable=MUTABLE)
    state, want = replay.add(state, rows, lengths)
    assert same(handles, want)
    sample, variables = table.apply(variables, 6, key, method="sample", mutable=MUTABLE)
    state, want = replay.sample(state, key, 6)
    assert same(sample, want)
    priorities = jnp.arange(6, dtype=jnp.float32)
    _, variables = table.apply(variables, sample.handles, priorities, method="update_priorities", mutable=MUTABLE)
    state = replay.update_priorities(state, want.handles, priorities)
    step = {"observation": jnp.ones((2, 3)), "reward": jnp.ones((2,))}
    for done in (False, True):
        args = jnp.arange(2, dtype=jnp.int32), step, jnp.full((2,), done)
        handles, variables = table.apply(variables, *args, method="append", mutable=MUTABLE)
        state, want = replay.append(state, *args)
        assert same(handles, want)
    assert bool(table.apply(variables, method="can_sample"))
    assert same(table.apply(variables), state)
    assert replay.stats(table.apply(variables))["trajectories"] == 6


def test_sample_reuses_an_earlier_batch(replay, make_rows):
    table = LinenReplay(replay)
    rows, lengths = make_rows()
    _, variables = table.apply(table.init(jax.random.key(0)), rows, lengths, method="add", mutable=MUTABLE)
    first, variables = table.apply(variables, 4, jax.random.key(0), method="sample", mutable=MUTABLE)
    _, variables = table.apply(variables, 4, jax.random.key(1), first, method="sample", mutable=MUTABLE)
    assert first.data["reward"].is_deleted()


def test_start_and_done_are_a_sample(replay, make_rows, same):
    table = LinenReplay(replay)
    rows, lengths = make_rows()
    key = jax.random.key(5)

    def filled():
        return table.apply(table.init(jax.random.key(0)), rows, lengths, method="add", mutable=MUTABLE)[1]

    for args, rngs in (((6, key), {}), ((6,), {"replay": key})):
        wanted, other = table.apply(filled(), *args, method="sample", mutable=MUTABLE, rngs=rngs)
        pending, variables = table.apply(filled(), *args, method="sample_start", mutable=MUTABLE, rngs=rngs)
        sample = table.apply(variables, pending, method="sample_done")
        assert same(sample, wanted)
        assert same(variables, other)


def test_stream_gives_the_key(replay, make_rows, same):
    table = LinenReplay(replay)
    rows, lengths = make_rows()

    def draw(seed):
        _, variables = table.apply(table.init(jax.random.key(0)), rows, lengths, method="add", mutable=MUTABLE)
        rngs = {"replay": jax.random.key(seed)}
        return table.apply(variables, 16, method="sample", mutable=MUTABLE, rngs=rngs)[0].handles

    assert same(draw(1), draw(1))
    assert not same(draw(1), draw(2))


def test_init_seeds_the_selector():
    columns = {"x": gear.ColumnSpec((), jnp.float32)}
    replay = gear.make_replay(gear.TableSpec(columns, 2, 8), gear.selectors.Permutation())
    table = LinenReplay(replay)
    seeds = [table.init(jax.random.key(i))["replay"]["state"].selector.seed for i in (0, 1)]
    assert not jnp.array_equal(*seeds)
    assert jnp.array_equal(seeds[0], table.init({"params": jax.random.key(0)})["replay"]["state"].selector.seed)
    assert table.init({})["replay"]["state"].selector.seed.shape == (4,)


def test_eager_calls_are_in_place(replay, make_rows):
    table = LinenReplay(replay)
    variables = table.init(jax.random.key(0))
    column = variables["replay"]["state"].columns["observation"]
    where = column.unsafe_buffer_pointer()
    rows, lengths = make_rows()
    _, variables = table.apply(variables, rows, lengths, method="add", mutable=MUTABLE)
    assert column.is_deleted()
    assert variables["replay"]["state"].columns["observation"].unsafe_buffer_pointer() == where


@pytest.mark.parametrize(
    ("method", "args"),
    [
        ("add", ({}, 0)),
        ("append", (0, {}, True)),
        ("sample", (4,)),
        ("sample_start", (4,)),
        ("update_priorities", (0, 0)),
    ],
)
def test_immutable_collection_is_refused_before_anything_runs(replay, method, args):
    table = LinenReplay(replay)
    variables = table.init(jax.random.key(0))
    with pytest.raises(ValueError, match=rf"{method}: collection 'replay': got immutable.*mutable=\['replay'\]"):
        table.apply(variables, *args, method=method)
    assert not variables["replay"]["state"].ticket.is_deleted()


def test_missing_key_and_missing_collection(replay, make_rows):
    table = LinenReplay(replay)
    variables = table.init(jax.random.key(0))
    with pytest.raises(ValueError, match=r"sample: key.*rngs=\{'replay': key\}"):
        table.apply(variables, 4, method="sample", mutable=MUTABLE)
    with pytest.raises(ValueError, match="sample_start: key: got None"):
        table.apply(variables, 4, method="sample_start", mutable=MUTABLE)
    rows, lengths = make_rows()
    with pytest.raises(ValueError, match=r"variables\['replay'\]: got no state.*'replay': replay"):
        table.apply({}, rows, lengths, method="add", mutable=MUTABLE)


def test_consumed_collection_is_named(replay, make_rows):
    table = LinenReplay(replay)
    variables = table.init(jax.random.key(0))
    rows, lengths = make_rows()
    table.apply(variables, rows, lengths, method="add", mutable=MUTABLE)
    with pytest.raises(ValueError, match="that an earlier call has consumed"):
        table.apply(variables, rows, lengths, method="add", mutable=MUTABLE)


def test_train_state_step_is_in_place(replay, make_rows, memory):
    agent, variables = make_agent(replay)
    assert set(variables) == {"params", "replay"}
    assert set(variables["params"]) == {"net"}
    state = TrainState.create(
        apply_fn=agent.apply, params=variables["params"], tx=optax.sgd(1e-1, momentum=0.9), replay=variables["replay"]
    ).replace(step=jnp.int32(0))
    # Columns in pinned_host are committed to their device, and so is all that comes out of a program with them.
    state = jax.tree.map(lambda x: jax.device_put(x, x.sharding), state)
    step = make_step(agent)
    key = jax.random.key(1)
    gear.assert_in_place(jax.jit(step, donate_argnums=0), state, make_rows(), key)
    with pytest.raises(ValueError, match=r"column '(observation|reward)'"):
        gear.assert_in_place(jax.jit(step), state, make_rows(), key)

    compiled = jax.jit(step, donate_argnums=0)
    column = state.replay["table"]["state"].columns["observation"]
    where, kind = column.unsafe_buffer_pointer(), column.sharding.memory_kind
    losses = []
    for i in range(30):
        state, value = compiled(state, make_rows(seed=0), jax.random.fold_in(key, i))
        losses.append(float(value))
    held = state.replay["table"]["state"]
    assert held.columns["observation"].unsafe_buffer_pointer() == where
    assert held.columns["observation"].sharding.memory_kind == kind == memory
    assert compiled._cache_size() == 1
    assert losses[-1] < losses[0]
    stats = replay.stats(held)
    assert (stats["inserted"], stats["sampled"], stats["trajectories"]) == (120, 240, 16)


def test_scan_over_steps_is_in_place(replay, make_rows):
    agent, variables = make_agent(replay)
    step = make_step(agent)

    def train(state, rows, keys):
        return jax.lax.scan(lambda s, key: step(s, rows, key), state, keys)

    def make_state():
        return TrainState.create(apply_fn=agent.apply, params=variables["params"], tx=optax.sgd(1e-2), replay=held)

    held = variables["replay"]
    keys = jax.random.split(jax.random.key(0), 5)
    gear.assert_in_place(jax.jit(train, donate_argnums=0), make_state(), make_rows(), keys)
    state, losses = jax.jit(train, donate_argnums=0)(make_state(), make_rows(), keys)
    assert losses.shape == (5,)
    assert replay.stats(state.replay["table"]["state"])["inserted"] == 20


def test_lifted_scan_carries_the_table(replay, make_rows):
    class Draws(nn.Module):
        @nn.compact
        def __call__(self, carry, _):
            return carry, LinenReplay(replay, name="table").sample(4).handles.slot

    class Loop(nn.Module):
        @nn.compact
        def __call__(self):
            loop = nn.scan(Draws, variable_carry=COLLECTION, split_rngs={COLLECTION: True}, length=6)
            return loop(name="draws")(None, None)[1]

    rows, lengths = make_rows()
    state, _ = replay.add(replay.init(), rows, lengths)
    variables = {"replay": {"draws": {"table": {"state": state}}}}
    rngs = {"replay": jax.random.key(0)}
    slots, variables = Loop().apply(variables, mutable=MUTABLE, rngs=rngs)
    assert slots.shape == (6, 4)
    assert len({tuple(row.tolist()) for row in slots}) > 1
    assert replay.stats(variables["replay"]["draws"]["table"]["state"])["sampled"] == 24


def test_priorities_from_a_loss_are_constants(replay, make_rows):
    agent, variables = make_agent(replay)
    _, changed = agent.apply(variables, *make_rows(), method="add", mutable=MUTABLE)

    def loss(params):
        rngs = {"replay": jax.random.key(0)}
        return agent.apply({"params": params, **changed}, 8, method="loss", mutable=MUTABLE, rngs=rngs)

    grads, after = jax.grad(loss, has_aux=True)(variables["params"])
    assert set(grads) == {"net"}
    priority = after["replay"]["table"]["state"].priority
    assert jnp.all(jnp.isfinite(priority))
    assert replay.stats(after["replay"]["table"]["state"])["sampled"] == 8


def test_flax_serialization_and_orbax(replay, make_rows, same, tmp_path, memory):
    agent, variables = make_agent(replay)
    _, changed = agent.apply(variables, *make_rows(), method="add", mutable=MUTABLE)
    variables = {"params": variables["params"], **changed}
    empty = make_agent(replay)[1]
    assert same(flax.serialization.from_bytes(empty, flax.serialization.to_bytes(variables)), variables)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "variables", variables)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "variables", empty)
    assert same(restored, variables)
    assert isinstance(restored["replay"]["table"]["state"], gear.ReplayState)
    assert restored["replay"]["table"]["state"].columns["reward"].sharding.memory_kind == memory


def test_gear_checkpoint_of_the_variable(replay, make_rows, same, tmp_path, memory):
    table = LinenReplay(replay)
    rows, lengths = make_rows()
    _, variables = table.apply(table.init(jax.random.key(0)), rows, lengths, method="add", mutable=MUTABLE)
    gear.checkpoint.save(tmp_path, 1, table.apply(variables), replay)
    restored = {"replay": {"state": gear.checkpoint.restore(tmp_path, replay)}}
    assert restored["replay"]["state"].columns["reward"].sharding.memory_kind == memory
    draw = lambda v: table.apply(v, 8, jax.random.key(3), method="sample", mutable=MUTABLE)[0]  # noqa: E731
    assert same(draw(restored), draw(variables))


def test_tabulate(replay):
    assert "LinenReplay" in LinenReplay(replay).tabulate(jax.random.key(0))


@pytest.mark.devices(4)
def test_a_table_over_a_mesh(replay_over_mesh, make_rows, same, memory):
    """apply(mutable=...) in jit and scan: in place on every device, compiled once, as the replay's own calls."""
    replay = replay_over_mesh
    agent, variables = make_agent(replay)
    mesh = replay.placement.mesh
    params = jax.device_put(variables["params"], jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    state = TrainState.create(apply_fn=agent.apply, params=params, tx=optax.sgd(1e-1), replay=variables["replay"])
    step = make_step(agent)

    def train(state, rows, keys):
        return jax.lax.scan(lambda state, key: step(state, rows, key), state, keys)

    compiled = jax.jit(train, donate_argnums=0)
    keys = jax.random.split(jax.random.key(0), 3)
    gear.assert_in_place(compiled, state, make_rows(8), keys)
    held = state.replay["table"]["state"].columns["observation"]
    where, losses = [x.data.unsafe_buffer_pointer() for x in held.addressable_shards], []
    for _ in range(8):
        state, value = compiled(state, make_rows(8), keys)
        losses.append(value)
    held = state.replay["table"]["state"].columns["observation"]
    assert [x.data.unsafe_buffer_pointer() for x in held.addressable_shards] == where
    assert held.sharding.memory_kind == memory and len(held.sharding.device_set) == 4
    assert losses[-1][-1] < losses[0][0]
    assert replay.stats(state.replay["table"]["state"])["sampled"] == 8 * 3 * 8

    # Outside jit.
    table, state, key = LinenReplay(replay), replay.init(), jax.random.key(3)
    state, _ = replay.add(state, *make_rows(8))
    _, variables = table.apply(table.init(jax.random.key(0)), *make_rows(8), method="add", mutable=MUTABLE)
    sample, _ = table.apply(variables, 8, key, method="sample", mutable=MUTABLE)
    assert same(sample, replay.sample(state, key, 8)[1])


def test_versions_and_their_expiry_mirror_replay(table_spec, make_rows, same):
    replay = gear.make_replay(table_spec, gear.selectors.Queue(2), max_staleness=1)
    table, state, (rows, lengths) = LinenReplay(replay), replay.init(), make_rows()
    variables = table.init(jax.random.key(0))
    versions = jnp.arange(4, dtype=jnp.int32)
    state, want = replay.add(state, rows, lengths, version=versions)
    handles, variables = table.apply(variables, rows, lengths, None, versions, method="add", mutable=MUTABLE)
    assert same(handles, want)
    _, variables = table.apply(variables, 3, method="expire", mutable=MUTABLE)
    assert same(table.apply(variables), replay.expire(state, 3))
    with pytest.raises(ValueError, match="expire: collection 'replay': got immutable"):
        table.apply(variables, 4, method="expire")
