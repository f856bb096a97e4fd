#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Small random changes of the package's own code, one at a time, each against the tests that should detect it.
#   scripts/mutate.sh --mutants 200 --seed S [--folder protocol …] [--only N]      exit code 1 if one survived
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/setup.sh
. scripts/setup.sh
pd_setup dev "$@"
export OMP_NUM_THREADS=1 PYTHONPATH=$PWD
exec "$PD_PYTHON" -m tools.mutate "$@"
