#!/usr/bin/env bash
# Makes the virtual environment DIR, or says everything that this machine lacks for it and for building gear_jax.
#
#   tools/make_venv.sh DIR         PYTHON=... picks the interpreter (default: the first of those below that is >= 3.11)
set -euo pipefail

dir=$1
candidates=(python3.12 python3.11 python3.13 python3.14 python3)

# An interpreter on PATH need not run (pyenv's shims), so ask it.
usable() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

python=
if [[ -n ${PYTHON:-} ]]; then
  usable "$PYTHON" && python=$PYTHON
else
  for candidate in "${candidates[@]}"; do
    if usable "$candidate"; then
      python=$candidate
      break
    fi
  done
fi
if [[ -z $python ]]; then
  if [[ -n ${PYTHON:-} ]]; then
    found="PYTHON=$PYTHON does not run or is older"
  else
    found="none of ${candidates[*]} is"
  fi
  {
    echo "gear_jax needs Python 3.11 or newer; $found."
    echo "Install one (Debian, Ubuntu: apt-get install python3.12 python3.12-venv python3.12-dev, or 3.11),"
    echo "or name one: make PYTHON=/path/to/python3.12 ..."
  } >&2
  exit 1
fi

version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
missing=()
packages=()
if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
  missing+=("the modules venv and ensurepip of Python $version")
  packages+=("python$version-venv")
fi
header=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"] + "/Python.h")')
if [[ ! -e $header ]]; then
  missing+=("the C headers of Python $version ($header)")
  packages+=("python$version-dev")
fi
if ! command -v "${CXX:-c++}" >/dev/null; then
  missing+=("a C++17 compiler (${CXX:-c++})")
  packages+=(g++)
fi
if [[ ${#missing[@]} -gt 0 ]]; then
  {
    echo "To build gear_jax with $python this machine lacks:"
    printf '  - %s\n' "${missing[@]}"
    echo "On Debian or Ubuntu: sudo apt-get install ${packages[*]}"
  } >&2
  exit 1
fi

echo "Making $dir with $python (Python $version)"
if ! "$python" -m venv "$dir"; then
  rm -rf "$dir"
  exit 1
fi
