"""One engine's process. The parent starts this file by path with the engine's interpreter:

    PYTHON worker.py ENGINE WORKLOAD full|quick

Lines of JSON come in on standard input and go out on standard output; whatever the library prints goes to
standard error. The first line out tells versions, and for each row the variants or the reason why it cannot
run. Then `{"row": i, "seconds": s}` times row i, and the end of the input ends the process.
"""

import importlib.util
import json
import os
import pathlib
import sys
import traceback
from typing import Any

_PACKAGE = "gear_jax_bench"  # this folder, importable without gear_jax


def _load_package() -> None:
    folder = pathlib.Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if pathlib.Path(entry or ".").resolve() != folder]
    spec = importlib.util.spec_from_file_location(
        _PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {folder}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_PACKAGE] = module
    spec.loader.exec_module(module)


class Worker:
    """Holds one engine with one workload and answers the parent."""

    def __init__(self, engine: str, workload: str, quick: bool):
        self.engines = importlib.import_module(f"{_PACKAGE}.engines")
        self.base = importlib.import_module(f"{_PACKAGE}.engines.base")
        self.check = importlib.import_module(f"{_PACKAGE}.check")
        self.timing = importlib.import_module(f"{_PACKAGE}.timing")
        self.workload = importlib.import_module(f"{_PACKAGE}.workloads").workloads(quick)[workload]
        self.name = engine
        self.calls: list[list[Any]] = []

    def start(self) -> dict[str, Any]:
        """Loads the library, fills the table and checks every row."""
        kind = self.engines.load(self.name)
        kind.prepare()
        report: dict[str, Any] = {"versions": kind.versions(), "rows": []}
        self.engine = kind(self.workload)
        report["mark"] = self.engine.mark
        try:
            self.engine.fill()
        except self.base.Unsupported as reason:
            report["rows"] = [{"unsupported": str(reason)} for _ in self.workload.rows]
            return report
        for row in self.workload.rows:
            report["rows"].append(self._check(row))
        return report

    def _check(self, row: Any) -> dict[str, Any]:
        self.calls.append([])
        try:
            calls = self.engine.calls(row)
            for call in calls:
                self.engine.check(row, call)
        except self.base.Unsupported as reason:
            return {"unsupported": str(reason)}
        except self.check.WrongBatch as error:
            return {"wrong": f"{row.name}: {error}"}
        self.calls[-1] = calls
        return {"variants": [call.variant for call in calls], "pipeline": [call.pipeline for call in calls]}

    def time(self, row: int, seconds: float) -> dict[str, Any]:
        """Times every variant of a row."""
        found = []
        for call in self.calls[row]:
            spent, calls = self.timing.time_calls(call.run, seconds, call.pipeline)
            found.append({"variant": call.variant, "seconds": spent, "calls": calls})
        return {"times": found}


def main() -> int:
    """Serves the parent until its input ends."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    _load_package()
    engine, workload, size = sys.argv[1:]
    try:
        worker = Worker(engine, workload, size == "quick")
        print(json.dumps(worker.start()), file=out, flush=True)
        for line in sys.stdin:
            print(json.dumps(worker.time(**json.loads(line))), file=out, flush=True)
        worker.engine.close()
    except Exception as error:  # the parent shows it in the table; the traceback is in the log
        traceback.print_exc()
        print(json.dumps({"failed": f"{type(error).__name__}: {error}"}), file=out, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    # Libraries with servers and threads may hang while the interpreter shuts down.
    os._exit(status)
