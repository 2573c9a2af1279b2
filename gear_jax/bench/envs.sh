#!/usr/bin/env bash
# Makes the virtual environments of the benchmark's peers, one at a time, below one folder:
#
#   bash envs.sh DIR [PEER ...]        PEER: jax-peers | torchrl | reverb   (default: all three)
#
# They are apart because the peers' requirements exclude each other: dm-reverb needs TensorFlow 2.15 and
# Python <= 3.11, and torchrl brings torch. Set PYTHON to the interpreter to use (default: python3.11).
set -euo pipefail

usage() { sed -n '2,7s/^# \{0,1\}//p' "$0"; }

if [[ $# -lt 1 || $1 == -h || $1 == --help ]]; then
  usage
  exit 2
fi
dir=$1
shift
peers=("$@")
[[ ${#peers[@]} -gt 0 ]] || peers=(jax-peers torchrl reverb)
python=${PYTHON:-python3.11}

# Arguments: the environment's name, then pip requirements.
make_env() {
  local env=$dir/$1
  shift
  if [[ -e $env/.complete ]]; then
    echo "$env: present"
    return
  fi
  echo "$env: installing $*"
  "$python" -m venv "$env"
  "$env/bin/pip" install --quiet "$@"
  touch "$env/.complete"
}

for peer in "${peers[@]}"; do
  case $peer in
    jax-peers) make_env bench-jax-peers "jax==0.10.2" "flashbax==0.1.3" "cpprb==11.0.0" ;;
    # Named together: torchrl alone would bring the newest torch and its CUDA packages.
    torchrl) make_env bench-torchrl "torch==2.13.0" "torchrl==0.14.1" numpy ;;
    reverb) make_env bench-reverb "dm-reverb[tensorflow]==0.14.0" "tensorflow~=2.15.0" ;;
    *)
      echo "unknown peer '$peer': jax-peers, torchrl or reverb" >&2
      exit 2
      ;;
  esac
done
