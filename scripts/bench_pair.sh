#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Time to the first token of one engine, of vLLM's own MooncakeConnector and of this package, interleaved in one run.
# --help shows the flags.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/setup.sh
. scripts/setup.sh
pd_setup run "$@"
export PD_DEVICE
exec "$PD_PYTHON" -m tools.bench_pair "$@"
