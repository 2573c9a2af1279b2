"""The command line: what a preset decides, and what is refused."""

import jax
import pytest
from flax import nnx


@pytest.fixture
def options(example):
    return example("_options")


@pytest.mark.parametrize(("backend", "preset"), [("cpu", "cpu"), ("gpu", "gpu"), ("tpu", "cpu")])
def test_the_machine_decides_unless_told(options, monkeypatch, backend, preset):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    assert options.parse([]) == options.parse(["--preset", preset])
    assert options.parse([]).preset == preset
    assert options.parse(["--preset", "gpu"]).preset == "gpu"


@pytest.mark.parametrize("preset", ["cpu", "gpu"])
def test_flags_go_before_the_preset(options, preset):
    found = options.parse(["--batch", "7", "--preset", preset, "--no-overlap", "--compute", "float32"])
    assert (found.batch, found.overlap, found.compute) == (7, False, "float32")
    assert found.width == options.PRESETS[preset]["width"]
    assert None not in [value for name, value in vars(found).items() if name not in ("memory", "devices")]


def test_the_size_of_the_presets(example, options):
    """The small job is what two cores do in a minute; the large one has 100 steps of context and 25 M parameters."""
    module = example("_model")

    def parameters(found):
        config = module.ModelConfig(
            8, 2, found.context, 1000, width=found.width, layers=found.layers, heads=found.heads
        )
        model = nnx.eval_shape(lambda: module.DecisionTransformer(config, nnx.Rngs(0)))
        return sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))

    small, large = options.parse(["--preset", "cpu"]), options.parse(["--preset", "gpu"])
    assert parameters(small) < 1e6 and (small.context, small.overlap) == (20, False)
    assert parameters(large) >= 25e6 and large.context >= 100
    assert large.overlap and large.compute == "bfloat16" and large.compare > 0


@pytest.mark.parametrize("arguments", [["--steps", "5"], ["--evaluate-every", "3"], ["--steps", "0"]])
def test_steps_that_do_not_fit_the_chunk(options, arguments, capsys):
    with pytest.raises(SystemExit):
        options.parse(["--chunk", "2", *arguments])
    assert arguments[0] in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--preset tpu", "--width 30", "--memory disk", "--compute int8"])
def test_what_is_refused(options, flag, capsys):
    with pytest.raises(SystemExit):
        options.parse(["--heads", "4", *flag.split()])
    assert flag.split()[0] in capsys.readouterr().err


@pytest.mark.devices(4)
def test_several_devices(options, capsys):
    found = options.parse(["--preset", "gpu", "--devices", "4"])
    assert (found.devices, found.overlap) == (jax.devices()[:4], False)
    for wrong in ("--devices 9999", "--devices 0", "--devices 4 --overlap", "--devices 4 --batch 6"):
        with pytest.raises(SystemExit):
            options.parse(wrong.split())
        assert f"{wrong.split()[2 if len(wrong.split()) > 2 else 0]}: got" in capsys.readouterr().err


def test_help_shows_the_preset_s_defaults(options, capsys):
    for preset, context in (("cpu", 20), ("gpu", 128)):
        with pytest.raises(SystemExit):
            options.parse(["--help", "--preset", preset])
        text = " ".join(capsys.readouterr().out.split())
        assert f"Defaults: preset {preset}." in text
        assert f"K, the steps that the model looks back on (default: {context})" in text
