#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Mutated bytes for every decoder that reads from a socket: nothing crashes, nothing grows, nothing forged is accepted.
#   scripts/fuzz.sh --inputs 1000000 [--seed S] [--target NAME]      exit code 1 if a rule was broken
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/setup.sh
. scripts/setup.sh
pd_setup unbuilt "$@"
export OMP_NUM_THREADS=1 PYTHONPATH=$PWD
exec "$PD_PYTHON" -m tools.fuzz "$@"
