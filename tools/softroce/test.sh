#!/bin/bash
# test.sh VENV CPP_TEST: the RDMA tests, in the guests (make test-rdma). VENV has Python 3.11 and gear_jax; CPP_TEST is
# the C++ test of the verbs transport. Skips, saying why, where the guest or pyverbs cannot be had.
set -euo pipefail
here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
venv=${1:?usage: test.sh VENV CPP_TEST} cpp_test=$(readlink -f "${2:?usage: test.sh VENV CPP_TEST}")
python=$(readlink -f "$venv")/bin/python

skip() { echo "RDMA tests skipped: $*"; exit 0; }

version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
[[ $version == 3.11 ]] || skip "Debian's pyverbs is built for Python 3.11, and $venv has $version"
status=0
"$here/setup.sh" || status=$?
((status != 77)) || skip "the guest cannot be had (see above)"
((status == 0)) || exit "$status"
"$here/link_pyverbs.sh" "$venv"

cd "$here/../.."
GEAR_JAX_SECRET=$("$python" -c 'import secrets; print(secrets.token_hex(32))')
export GEAR_JAX_SECRET # handed on by name: others on the machine can read command lines
echo "One guest: the C++ side; both sides and the contract of a transport; with jax, the ops"
# What is compiled there runs once or twice.
# shellcheck disable=SC2016 # the guest's shell expands these
"$here/run.sh" --timeout 600 --mem 1536M --env GEAR_JAX_RDMA=1 --env JAX_PLATFORMS=cpu \
  --env XLA_FLAGS=--xla_backend_optimization_level=0 -- bash -ec '
    "$1" --gtest_brief=1
    "$2" -m pytest -q --noconftest -p no:cacheprovider tests/rdma --ignore tests/rdma/test_fetch.py
    "$2" -m pytest -q --noconftest -p no:cacheprovider tests/rdma/test_fetch.py' - "$cpp_test" "$python"
echo "Two guests: a job over a link, a process killed, a guest gone"
"$here/run2.sh" --timeout 180 --mem 768M --env GEAR_JAX_SECRET -- "$python" tests/rdma/two_guests.py
