import json

import pytest

from gear_jax import bench
from gear_jax.bench import cli as cpu
from gear_jax.bench.gpu import cli, rows


def test_without_a_gpu_it_says_so_and_what_to_do(monkeypatch, capsys):
    monkeypatch.setattr(cli.jax, "default_backend", lambda: "cpu")
    assert bench.main(["--device", "gpu", "--quick"]) == 2
    text = capsys.readouterr().err
    assert "'cpu', wanted 'gpu'" in text and "--tiny" in text


def test_the_command_writes_tables_json_and_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    names = [str(tmp_path / name) for name in ("out.json", "out.md", "out.png")]
    argv = ["--device=gpu", "--tiny", "--rows", "gather,latency", "--json", names[0], "--markdown", names[1]]
    assert bench.main([*argv, "--plot", names[2]]) == 0
    result = json.loads((tmp_path / "out.json").read_text())
    assert list(result["rows"]) == ["gather", "latency"]
    assert result["options"]["size"] == "tiny" and result["machine"]["versions"]["jax"]
    assert "## Targets" in (tmp_path / "out.md").read_text()
    shown = capsys.readouterr()
    assert "gather, random rows" in shown.out and "latency:" in shown.err


def test_an_earlier_result_is_shown_again(result, tmp_path, capsys):
    (tmp_path / "old.json").write_text(json.dumps(result))
    out = str(tmp_path / "new.md")
    assert (
        cli.run(["--device", "gpu", "--from", str(tmp_path / "old.json"), "--markdown", out]) == 1
    )  # `guard` is wrong
    assert "NVIDIA H100" in (tmp_path / "new.md").read_text()
    assert "the column lies elsewhere" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--device", "gpu", "--rows", "nothing"], ",".join(rows.NAMES)),
        (["--device", "gpu", "--rows", ""], "wanted some of"),
        (["--device", "gpu", "--quick", "--tiny"], "not allowed with"),
        (["--device", "gpu", "--workloads", "S1a"], "unrecognized arguments"),
        (["--device", "tpu"], "invalid choice"),
    ],
)
def test_bad_arguments_say_what_is_wanted(argv, text, capsys):
    with pytest.raises(SystemExit) as status:
        bench.main(argv)
    assert status.value.code == 2 and text in capsys.readouterr().err


def test_help_lists_the_rows(capsys):
    with pytest.raises(SystemExit):
        bench.main(["--device", "gpu", "--help"])
    text = capsys.readouterr().out
    assert all(row.about in " ".join(text.split()) or row.name in text for row in rows.ROWS)


def test_the_other_benchmark_takes_its_device_too():
    assert cpu.parser().parse_args(["--device", "cpu"]).device == "cpu"
    assert cpu._kind(["--quick", "--device=gpu"])[0] == "gpu" and cpu._kind(["--quick"])[0] is None
