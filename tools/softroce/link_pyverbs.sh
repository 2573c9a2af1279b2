#!/bin/bash
# link_pyverbs.sh VENV: makes Debian's pyverbs importable in a virtual environment of Python 3.11, and nothing else of
# Debian's. (The pyverbs of the package index wants a newer libibverbs than Debian 12 has.)
set -euo pipefail
venv=${1:?usage: link_pyverbs.sh VENV}
from=/usr/lib/python3/dist-packages/pyverbs
version=$("$venv/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
[[ $version == 3.11 ]] || { echo "link_pyverbs: $venv has Python $version; Debian's pyverbs is built for 3.11" >&2; exit 1; }
[[ -d $from ]] || { echo "link_pyverbs: $from is missing: apt-get install python3-pyverbs" >&2; exit 1; }
dir=$(readlink -f "$venv")/pyverbs-debian
mkdir -p "$dir"
ln -sfn "$from" "$dir/pyverbs"
echo "$dir" >"$("$venv/bin/python" -c 'import site; print(site.getsitepackages()[0])')/pyverbs-debian.pth"
