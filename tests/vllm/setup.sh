#!/usr/bin/env bash
# Make .kvferry/vllm-venv: vLLM for the CPU, and this kvferry. Called by `make test-vllm`; does nothing when that is up to date.
# PYTHON and TORCH_INDEX as for `make setup`; here it has to be Python 3.11, for which requirements.txt has the hashes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

readonly here=tests/vllm venv=.kvferry/vllm-venv

fail() { printf 'test-vllm: %s\n' "$*" >&2; exit 1; }

is_wanted() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 11))' >/dev/null 2>&1; }

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3.11 python3}; do
    if command -v "$candidate" >/dev/null && is_wanted "$candidate"; then echo "$candidate"; return; fi
  done
  fail "Python 3.11 with venv is needed; on Debian or Ubuntu: python3.11-venv; or name one: make test-vllm PYTHON=/path/to/python3.11"
}

mkdir -p .kvferry
exec 9> "$venv.lock"
flock 9  # a second call waits for the first one

[ "$(uname -sm)" = "Linux x86_64" ] || fail "needs Linux on x86-64, for which requirements.txt has the hashes; this is $(uname -sm)"

torch=$(sed -n 's/^torch==/torch==/p' constraints.txt)
digest() { sha256sum | cut -c 1-16; }
engine_stamp=$venv/.engine-$({ cat "$here/requirements.txt"; echo "$torch"; } | digest)
kvferry_stamp=$venv/.kvferry-$({ pwd; cat pyproject.toml; } | digest)  # installed as the folder that it lies in, with its entry points
install=("$venv/bin/python" -m pip install --disable-pip-version-check --progress-bar off --quiet --no-deps)

if ! { [ -e "$engine_stamp" ] && "$venv/bin/python" -c '' 2>/dev/null; }; then
  python=$(find_python)
  rm -rf "$venv"
  "$python" -m venv "$venv" || fail "$python could not create $venv (see above)"
  echo "test-vllm: installing vLLM into $venv with $("$venv/bin/python" --version), which takes minutes" >&2
  # As .ci/setup has it: alone and first, so that no other package is ever looked up on that index. Only the CPU build will do.
  "${install[@]}" ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$torch+cpu" \
    || fail "$torch+cpu could not be installed${TORCH_INDEX:+ from TORCH_INDEX=$TORCH_INDEX}; make test-vllm TORCH_INDEX=https://download.pytorch.org/whl/cpu has it"
  "${install[@]}" --only-binary :all: --require-hashes -r "$here/requirements.txt" \
    || fail "pip could not install $here/requirements.txt (see above)"
  touch "$engine_stamp"
fi
if ! [ -e "$kvferry_stamp" ]; then
  "${install[@]}" --no-build-isolation -e . || fail "pip could not install kvferry (see above)"
  touch "$kvferry_stamp"
fi
