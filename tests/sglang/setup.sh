#!/usr/bin/env bash
# Makes the environment that tests/sglang runs its engines in: bash tests/sglang/setup.sh [FOLDER]
# SGLang's own requirements bring CUDA; what it needs on a CPU is listed whole in requirements.txt and installed as listed.
#   PYTHON=...       Python 3.11 (the pins are for it)
#   TORCH_INDEX=URL  take torch from this package index, as for `make setup`
set -euo pipefail
root="$(cd "$(dirname "$0")/../.." && pwd)"
folder="${1:-$root/.kvferry/sglang-venv}"
stamp="$folder/.installed"
if [[ -e "$stamp" && ! "$root/tests/sglang/requirements.txt" -nt "$stamp" ]]; then
    exit 0
fi
"${PYTHON:-python3.11}" -m venv "$folder"
options=(--quiet --no-deps)
if [[ -n "${TORCH_INDEX:-}" ]]; then
    options+=(--extra-index-url "$TORCH_INDEX")
fi
"$folder/bin/python" -m pip install "${options[@]}" -r "$root/tests/sglang/requirements.txt"
# Editable, so that the engines run this checkout; it brings the entry point that SGLang finds the backend by.
"$folder/bin/python" -m pip install --quiet --no-deps --no-build-isolation --editable "$root"
touch "$stamp"
