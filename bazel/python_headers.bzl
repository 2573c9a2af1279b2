"""Repository rule: the headers of installed Python packages as cc_library targets, and the interpreter itself."""

_PROBE = """
import importlib.util, os, sys, sysconfig
import jaxlib, nanobind
print(os.path.join(os.path.dirname(jaxlib.__file__), 'include'))
print(sysconfig.get_paths()['include'])
print(os.path.dirname(nanobind.__file__))
print(sys.executable)
ucx = importlib.util.find_spec('libucx')
print(ucx.submodule_search_locations[0] if ucx else '')
"""

_BUILD = """
package(default_visibility = ["//visibility:public"])

exports_files(["interpreter"])

cc_library(
    name = "xla_ffi",
    hdrs = glob(["xla/**/*.h"]),
    includes = ["xla"],
)

cc_library(
    name = "python",
    hdrs = glob(["python/**/*.h"]),
    includes = ["python"],
)

cc_library(
    name = "ucx",
    hdrs = glob(["ucx/**/*.h"]),
    includes = ["ucx"],
)

cc_library(
    name = "nanobind",
    srcs = ["nanobind/src/nb_combined.cpp"],
    hdrs = glob(["nanobind/include/**/*.h"]),
    copts = ["-std=c++17", "-O3", "-fvisibility=hidden", "-fno-strict-aliasing", "-DNDEBUG", "-w"],
    includes = ["nanobind/ext/robin_map/include", "nanobind/include"],
    textual_hdrs = glob(
        ["nanobind/src/*.h", "nanobind/src/*.cpp", "nanobind/ext/**/*.h"],
        exclude = ["nanobind/src/nb_combined.cpp"],
    ),
    deps = [":python"],
)
"""

def _python_headers_impl(ctx):
    python = ctx.os.environ.get("PYTHON_BIN") or ctx.which("python3")
    if not python:
        fail("no Python: set PYTHON_BIN to an interpreter with jaxlib and nanobind")
    result = ctx.execute([python, "-c", _PROBE])
    if result.return_code:
        fail("%s lacks jaxlib or nanobind; set PYTHON_BIN to an interpreter that has both:\n%s" % (python, result.stderr))
    xla, include, nanobind, executable, ucx = result.stdout.split("\n")[:5]
    if not ctx.path(include + "/Python.h").exists:
        fail("%s has no Python.h in %s: install its development package" % (python, include))
    ctx.symlink(xla, "xla")
    ctx.symlink(include, "python")
    ctx.symlink(nanobind, "nanobind")
    if ucx:
        ctx.symlink(ucx + "/include", "ucx")
    ctx.file("defs.bzl", "HAS_UCX = %s\n" % bool(ucx))
    ctx.file("interpreter", '#!/bin/sh\nexec "%s" "$@"\n' % executable, executable = True)
    ctx.file("BUILD", _BUILD)

python_headers = repository_rule(
    implementation = _python_headers_impl,
    environ = ["PYTHON_BIN", "PATH"],
    local = True,
)
