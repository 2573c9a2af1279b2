"""NNXReplay: the table as a variable, in nnx.jit, nnx.scan, nnx.grad, split, and checkpoints."""

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import gear_jax as gear
from gear_jax.flax import NNXReplay, ReplayVariable


class Agent(nnx.Module):
    """A model that learns from a table of its own."""

    def __init__(self, replay, rngs):
        self.net = nnx.Linear(3, 1, rngs=rngs)
        self.table = NNXReplay(replay, rngs=rngs)

    def loss(self, batch_size):
        batch = self.table.sample(batch_size)
        error = jnp.square(self.net(batch.data["observation"])[..., 0] - batch.data["reward"])
        self.table.update_priorities(batch.handles, jnp.mean(error, 1))
        return jnp.mean(error)


def train_step(agent, optimizer, rows):
    agent.table.add(*rows)
    value, grads = nnx.value_and_grad(lambda a: a.loss(8))(agent)
    optimizer.update(agent, grads)
    return value


def make_agent(replay):
    agent = Agent(replay, nnx.Rngs(0))
    return agent, nnx.Optimizer(agent, optax.sgd(1e-1, momentum=0.9), wrt=nnx.Param)


def address(table):
    return table().columns["observation"].unsafe_buffer_pointer()


def test_mirrors_replay(replay, make_rows, same):
    table = NNXReplay(replay)
    state = replay.init()
    rows, lengths = make_rows()
    key = jax.random.key(5)
    state, want = replay.add(state, rows, lengths)
    assert same(table.add(rows, lengths), want)
    state, want = replay.sample(state, key, 6)
    sample = table.sample(6, key)
    assert same(sample, want)
    priorities = jnp.arange(6, dtype=jnp.float32)
    state = replay.update_priorities(state, want.handles, priorities)
    table.update_priorities(sample.handles, priorities)
    step = {"observation": jnp.ones((2, 3)), "reward": jnp.ones((2,))}
    for done in (False, True):
        args = jnp.arange(2, dtype=jnp.int32), step, jnp.full((2,), done)
        state, want = replay.append(state, *args)
        assert same(table.append(*args), want)
    assert bool(table.can_sample())
    assert same(table(), state)
    table.sample(6, key, out=sample)
    assert sample.data["reward"].is_deleted()


def test_start_and_done_are_a_sample(replay, make_rows, same):
    one, two = (NNXReplay(replay, rngs=nnx.Rngs(0)) for _ in range(2))
    for table in (one, two):
        table.add(*make_rows())
    for key in (None, jax.random.key(7)):
        assert same(two.sample_done(two.sample_start(6, key)), one.sample(6, key))
    assert same(one(), two())


def test_scan_carries_a_sample_in_flight(replay, make_rows, same):
    """In a variable of the module: each step starts the next sample and ends the one that the last step started."""

    class Loop(nnx.Module):
        def __init__(self):
            self.table = NNXReplay(replay, rngs=nnx.Rngs(0))
            self.table.add(*make_rows())
            self.pending = nnx.Variable(self.table.sample_start(4))

        def step(self):
            following = self.table.sample_start(4)
            sample = self.table.sample_done(self.pending.get_value(), after=following)
            self.pending.set_value(following)
            return sample

    @nnx.jit(donate_argnums=0)
    def run(loop):
        return nnx.scan(lambda m: (m, m.step()), length=3, in_axes=nnx.Carry, out_axes=(nnx.Carry, 0))(loop)[1]

    loop, other = Loop(), NNXReplay(replay, rngs=nnx.Rngs(0))
    other.add(*make_rows())
    gear.assert_in_place(run, loop)
    where = address(loop.table)
    batches = [run(loop), run(loop)]
    wanted = [other.sample(4) for _ in range(7)]
    joined = jax.tree.map(lambda *x: jnp.concatenate(x), *batches)
    assert same(joined, jax.tree.map(lambda *x: jnp.stack(x), *wanted[:6]))
    assert same(loop.table.sample_done(loop.pending.get_value()), wanted[6])
    assert address(loop.table) == where


def test_stream_gives_the_key(replay, make_rows, same):
    def draws(seed, count=2):
        table = NNXReplay(replay, rngs=nnx.Rngs(0, replay=seed))
        table.add(*make_rows())
        return [table.sample(16).handles for _ in range(count)]

    first, second = draws(1)
    assert not same(first, second)
    assert same(draws(1), [first, second])
    assert not same(draws(2)[0], first)


def test_key_is_needed_without_rngs(replay):
    with pytest.raises(ValueError, match=r"sample: key: got None.*NNXReplay\(replay, rngs"):
        NNXReplay(replay).sample(4)
    with pytest.raises(ValueError, match="sample_start: key: got None"):
        NNXReplay(replay).sample_start(4)
    with pytest.raises(TypeError, match=r"replay: got TableSpec, wanted a Replay"):
        NNXReplay(replay.config.table)


def test_the_table_is_no_parameter(replay):
    agent, optimizer = make_agent(replay)
    _, params, tables, rest = nnx.split(agent, nnx.Param, ReplayVariable, ...)
    assert set(nnx.to_pure_dict(params)) == {"net"}
    assert isinstance(nnx.to_pure_dict(tables)["table"]["state"], gear.ReplayState)
    assert not jax.tree.leaves(nnx.filter_state(rest, ReplayVariable))
    moments = [x for x in jax.tree.leaves(nnx.state(optimizer)) if x.ndim]
    assert sorted(x.shape for x in moments) == [(1,), (3, 1)]


def test_grad_leaves_the_table_out_and_updates_it(replay, make_rows):
    agent, _ = make_agent(replay)
    agent.table.add(*make_rows())
    where = address(agent.table)
    grads = nnx.grad(lambda a: a.loss(8))(agent)
    assert set(nnx.to_pure_dict(grads)) == {"net"}
    assert replay.stats(agent.table())["sampled"] == 8
    assert address(agent.table) == where


def test_eager_calls_are_in_place(replay, make_rows):
    table = NNXReplay(replay, rngs=nnx.Rngs(0))
    where, before = address(table), table()
    table.add(*make_rows())
    table.sample(4)
    assert address(table) == where
    with pytest.raises(ValueError, match="that an earlier call has consumed"):
        replay.stats(before)


def test_jit_with_donation_is_in_place(replay, make_rows, memory):
    agent, optimizer = make_agent(replay)
    step = nnx.jit(train_step, donate_argnums=(0, 1))
    gear.assert_in_place(step, agent, optimizer, make_rows())
    where = address(agent.table)
    losses = [float(step(agent, optimizer, make_rows())) for _ in range(30)]
    assert address(agent.table) == where
    assert agent.table().columns["observation"].sharding.memory_kind == memory
    assert losses[-1] < losses[0]
    stats = replay.stats(agent.table())
    assert (stats["inserted"], stats["sampled"], stats["trajectories"]) == (120, 240, 16)


def test_jit_without_donation_copies_and_is_found(replay, make_rows):
    agent, optimizer = make_agent(replay)
    with pytest.raises(ValueError, match=r"column '(observation|reward)'"):
        gear.assert_in_place(nnx.jit(train_step), agent, optimizer, make_rows())


def test_only_the_table_is_donated(replay, make_rows):
    table = NNXReplay(replay, rngs=nnx.Rngs(0))
    net = nnx.Linear(3, 1, rngs=nnx.Rngs(0))

    def step(net, table, rows):
        table.add(*rows)
        return jnp.mean(net(table.sample(4).data["observation"]))

    compiled = nnx.jit(step, donate_argnames="table")
    kernel, where = net.kernel.get_value(), address(table)
    gear.assert_in_place(compiled, net, table, make_rows())
    for _ in range(2):
        compiled(net, table, make_rows())
    assert address(table) == where
    assert not kernel.is_deleted()


def test_jit_compiles_once(replay, make_rows):
    traces = []

    @nnx.jit(donate_argnums=0)
    def step(table, rows):
        traces.append(1)
        table.add(*rows)
        return table.sample(4).handles

    table = NNXReplay(replay, rngs=nnx.Rngs(0))
    for i in range(4):
        step(table, make_rows(seed=i))
    assert len(traces) == 1


def test_scan_carries_the_module(replay, make_rows):
    table = NNXReplay(replay, rngs=nnx.Rngs(0))

    @nnx.jit(donate_argnums=0)
    def train(table, rows, xs):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
        def body(table, x):
            table.add(*rows)
            return table, table.sample(4).handles.slot + x

        return body(table, xs)[1]

    xs = jnp.zeros((6,), jnp.int32)
    gear.assert_in_place(train, table, make_rows(), xs)
    slots = train(table, make_rows(), xs)
    assert slots.shape == (6, 4)
    assert len({tuple(row.tolist()) for row in slots}) > 1
    assert replay.stats(table())["inserted"] == 24


def test_split_and_merge_in_plain_jit(replay, make_rows, same):
    table, other = (NNXReplay(replay, rngs=nnx.Rngs(0)) for _ in range(2))
    graph, state = nnx.split(table)

    def step(state, rows):
        module = nnx.merge(graph, state)
        module.add(*rows)
        slots = module.sample(4).handles.slot
        return nnx.state(module), slots

    gear.assert_in_place(jax.jit(step, donate_argnums=0), state, make_rows())
    state, slots = jax.jit(step, donate_argnums=0)(state, make_rows())
    nnx.update(table, state)
    other.add(*make_rows())
    assert same(other.sample(4).handles.slot, slots)
    assert same(table(), other())


def test_orbax_takes_the_module_along(replay, make_rows, same, tmp_path, memory):
    agent, _ = make_agent(replay)
    agent.table.add(*make_rows())
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "agent", nnx.state(agent))
        checkpointer.wait_until_finished()
        graph, target = nnx.split(make_agent(replay)[0])
        restored = nnx.merge(graph, checkpointer.restore(tmp_path / "agent", target))
    assert same(restored.table(), agent.table())
    assert restored.table().columns["observation"].sharding.memory_kind == memory
    assert same(restored.table.sample(8), agent.table.sample(8))


def test_gear_checkpoint_of_the_variable(replay, make_rows, same, tmp_path):
    table, other = (NNXReplay(replay, rngs=nnx.Rngs(0)) for _ in range(2))
    table.add(*make_rows())
    gear.checkpoint.save(tmp_path, 1, table(), replay)
    other.state.set_value(gear.checkpoint.restore(tmp_path, replay))
    assert same(other.sample(8), table.sample(8))


@pytest.mark.devices(4)
def test_a_table_over_a_mesh(replay_over_mesh, make_rows, same, memory):
    """nnx.jit and nnx.scan over it: in place on every device, compiled once, the same as the replay's own calls."""
    replay, traces = replay_over_mesh, []
    agent, optimizer = make_agent(replay)
    mesh = replay.placement.mesh
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    modules = agent, optimizer
    nnx.update(modules, jax.device_put(nnx.state(modules, nnx.Not(ReplayVariable)), everywhere))

    @nnx.jit(donate_argnums=(0, 1))
    def train(agent, optimizer, rows):
        traces.append(1)
        agent.table.add(*rows)

        @nnx.scan(length=3, in_axes=nnx.Carry, out_axes=(nnx.Carry, 0))
        def steps(modules):
            agent, optimizer = modules
            value, grads = nnx.value_and_grad(lambda a: a.loss(8))(agent)
            optimizer.update(agent, grads)
            return (agent, optimizer), value

        return steps((agent, optimizer))[1]

    gear.assert_in_place(train, agent, optimizer, make_rows(8))
    traces.clear()
    where = [x.data.unsafe_buffer_pointer() for x in agent.table().columns["observation"].addressable_shards]
    losses = [train(agent, optimizer, make_rows(8)) for _ in range(8)]
    column = agent.table().columns["observation"]
    assert [x.data.unsafe_buffer_pointer() for x in column.addressable_shards] == where
    assert column.sharding.memory_kind == memory and len(column.sharding.device_set) == 4
    assert len(traces) <= 1 and losses[-1][-1] < losses[0][0]
    stats = replay.stats(agent.table())
    assert (stats["inserted"], stats["sampled"], stats["trajectories"]) == (64, 8 * 3 * 8, 16)

    # Outside jit.
    key = jax.random.key(3)
    table, state = NNXReplay(replay), replay.init()
    state, _ = replay.add(state, *make_rows(8))
    table.add(*make_rows(8))
    assert same(table.sample(8, key), replay.sample(state, key, 8)[1])
    with pytest.raises(ValueError, match="sample_start: got a table over a mesh"):
        table.sample_start(8, key)


def test_versions_and_their_expiry_mirror_replay(table_spec, make_rows, same):
    replay = gear.make_replay(table_spec, gear.selectors.Queue(2), max_staleness=1, streams=2)
    table, state, (rows, lengths) = NNXReplay(replay), replay.init(), make_rows()
    versions = jnp.arange(4, dtype=jnp.int32)
    state, want = replay.add(state, rows, lengths, version=versions)
    assert same(table.add(rows, lengths, version=versions), want)
    state = replay.expire(state, 3)
    table.expire(3)
    step = jnp.arange(2, dtype=jnp.int32), {"observation": jnp.ones((2, 3)), "reward": jnp.ones((2,))}
    state, want = replay.append(state, *step, jnp.ones((2,), bool), version=versions[1:3])
    assert same(table.append(*step, jnp.ones((2,), bool), version=versions[1:3]), want)
    assert same(table(), state)
    numbers = replay.stats(state)
    assert (numbers["expired"], numbers["refused_stale"]) == (2, 1)
