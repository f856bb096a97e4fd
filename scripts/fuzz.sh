#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Mutated bytes for every decoder that reads from a socket: nothing crashes, nothing grows, nothing forged is accepted.
#   scripts/fuzz.sh --inputs 1000000 [--seed S] [--target NAME]      exit code 1 if a rule was broken
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
[[ -x $python ]] || python=python3
export OMP_NUM_THREADS=1
PYTHONPATH=$root exec "$python" -m tools.fuzz "$@"
