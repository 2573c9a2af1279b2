# Every target sets up what it needs in a virtual environment; a second run starts at once.
#
#   PYTHON=python3.12   interpreter to make the environment with (default: the first one >= 3.11)
#   VENV=.venv          where the environment is
#   JAX=0.11.2          JAX version to install (default: the newest that the interpreter and gear_jax allow)
#   GEAR_JAX_CUDA=AUTO  the CUDA library: AUTO, ON or OFF
#   BENCH_PYTHON=...    interpreter of the benchmark's peers (default: python3.11, the newest that all of them take)

VENV ?= .venv
JAX ?=
BAZEL ?= bazel
DEMO_ARGS ?=
BENCH_ARGS ?=
BENCH_PYTHON ?=
BENCH_ENVS := .venv-bench
# One worker per core; more than 8 only compete for memory. A worker gets tests that stand together: they compile the same.
PYTEST_ARGS ?= -n auto --maxprocesses=8 --dist worksteal

bin := $(VENV)/bin
# What the compiled modules are made from. Python files are not listed: the installation is editable.
sources := pyproject.toml CMakeLists.txt $(wildcard ffi/*.h ffi/*.cc ffi/actors/*.h ffi/actors/*.cc ffi/transport/*.h ffi/transport/*.cc cuda/*.h cuda/*.cuh cuda/*.cc cuda/*.cu)
install = $(bin)/python -m pip install --prefer-binary --disable-pip-version-check
jax = $(if $(JAX),"jax==$(JAX)")
installed := $(VENV)/.installed-jax$(JAX)

.PHONY: help demo test setup lint format types test-cpp test-cpp-threads test-rdma test-cuda test-cuda-sanitized bazel-test bench dist clean
.DELETE_ON_ERROR:

help:
	@echo 'make demo        record a dataset, train a Decision Transformer from it, show how well it plays'
	@echo 'make test        Python tests (PYTEST_ARGS="-k gather")'
	@echo 'make setup       the environment of the tests alone'
	@echo 'make test-cpp    C++ tests under the address and undefined-behaviour sanitizers (needs libgtest-dev)'
	@echo 'make test-cpp-threads  the same under the thread sanitizer'
	@echo 'make test-rdma   RDMA tests in small virtual machines with Soft-RoCE (Debian 12, Python 3.11; skips elsewhere)'
	@echo 'make test-cuda   tests of the CUDA kernels on a GPU (needs nvcc and libgtest-dev);  make test-cuda-sanitized'
	@echo '                 the same under compute-sanitizer (memcheck, racecheck, initcheck)'
	@echo 'make bazel-test  the Bazel build and its tests (needs bazel-bootstrap and libgtest-dev)'
	@echo 'make lint        ruff and clang-format;  make format  lets them change the files'
	@echo 'make types       pyright on the public API'
	@echo 'make bench       measure gear_jax and its peers, which get environments of their own (BENCH_ARGS=...)'
	@echo 'make dist        sdist and wheel in dist/'
	@echo 'make clean       remove what these made, the environments included'

$(VENV)/pyvenv.cfg:
	@PYTHON="$(PYTHON)" tools/make_venv.sh $(VENV)

# The set for the tests holds the set for the demo, so it leaves both marks.
$(installed)-demo: $(sources) | $(VENV)/pyvenv.cfg
	$(install) -e '.[datasets,examples]' $(jax)
	@rm -f $(VENV)/.installed-* && touch $@

$(installed)-test: $(sources) | $(VENV)/pyvenv.cfg
	$(install) -e '.[dev,datasets,examples,rdma]' $(jax)
	@rm -f $(VENV)/.installed-* && touch $@ $(installed)-demo

# Where there is a GPU and this build has kernels for it, JAX needs its CUDA plugin; it then runs the larger job.
demo: $(installed)-demo
	@if nvidia-smi -L >/dev/null 2>&1 && \
	  $(bin)/python -c 'from gear_jax import _native; raise SystemExit(_native.load("CUDA") is None)'; then \
	  cuda=$$($(bin)/python -c 'from gear_jax import _native; print(min(13, _native.load("CUDA").driver_version() // 1000))') && \
	  $(install) "jax[cuda$$cuda]$(addprefix ==,$(JAX))"; fi
	$(bin)/python examples/decision_transformer.py $(DEMO_ARGS)

setup: $(installed)-test

test: setup
	$(bin)/python -m pytest $(PYTEST_ARGS)

lint: $(installed)-test
	$(bin)/ruff check .
	$(bin)/clang-format --dry-run --Werror $(wildcard $(foreach d,ffi ffi/actors ffi/tests ffi/transport cuda cuda/tests,$d/*.h $d/*.cc $d/*.cu $d/*.cuh))

format: $(installed)-test
	$(bin)/ruff check --fix .
	$(bin)/clang-format -i $(wildcard $(foreach d,ffi ffi/actors ffi/tests ffi/transport cuda cuda/tests,$d/*.h $d/*.cc $d/*.cu $d/*.cuh))

types: $(installed)-test
	$(bin)/pyright --pythonpath $(bin)/python

test-cpp: sanitizer := address
test-cpp-threads: sanitizer := thread
test-cpp test-cpp-threads: $(installed)-test
	$(bin)/cmake -S . -B build/$(sanitizer) -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(bin))/ninja \
	  -DPython_EXECUTABLE=$(abspath $(bin))/python \
	  -DGEAR_JAX_BUILD_MODULES=OFF -DGEAR_JAX_BUILD_TESTS=ON -DGEAR_JAX_SANITIZE=$(sanitizer)
	$(bin)/cmake --build build/$(sanitizer)
	$(bin)/ctest --test-dir build/$(sanitizer) --output-on-failure

# Under the address sanitizer, like the C++ tests that need no device.
test-rdma: $(installed)-test
	$(bin)/cmake -S . -B build/address -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(bin))/ninja \
	  -DGEAR_JAX_BUILD_MODULES=OFF -DGEAR_JAX_BUILD_TESTS=ON -DGEAR_JAX_SANITIZE=address
	$(bin)/cmake --build build/address --target verbs_test
	tools/softroce/test.sh $(VENV) build/address/verbs_test

# compute-sanitizer runs kernels one after the other, so that everybody waits.
test-cuda test-cuda-sanitized: $(installed)-test
	$(bin)/cmake -S . -B build/cuda -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(bin))/ninja \
	  -DGEAR_JAX_BUILD_MODULES=OFF -DGEAR_JAX_BUILD_CUDA_TESTS=ON
	$(bin)/cmake --build build/cuda
	$(if $(findstring sanitized,$@),\
	  for test in build/cuda/*_kernels_test; do for tool in memcheck racecheck initcheck; do \
	    compute-sanitizer --tool $$tool --error-exitcode 1 $$test --gtest_filter=-*.NobodyWaits* || exit 1; done; done, \
	  $(bin)/ctest --test-dir build/cuda --output-on-failure)

bazel-test: $(installed)-test
	@command -v $(BAZEL) >/dev/null || { echo 'Bazel is missing (Debian, Ubuntu: apt-get install bazel-bootstrap)' >&2; exit 1; }
	PYTHON_BIN=$(abspath $(bin))/python $(BAZEL) test --symlink_prefix=/ --test_output=errors //...

bench: $(installed)-test
	PYTHON="$(BENCH_PYTHON)" $(bin)/python -m gear_jax bench --make-envs $(BENCH_ENVS)
	$(bin)/python -m gear_jax bench --envs $(BENCH_ENVS) $(BENCH_ARGS)

dist: $(installed)-test
	$(bin)/python -m build

clean:
	rm -rf $(VENV) .venv-* build dist bazel-*
