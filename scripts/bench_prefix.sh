#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Conversations over two prefill engines: chosen by load alone, and by prefix and load, in turns in one run.
# --help shows the flags.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/setup.sh
. scripts/setup.sh
pd_setup run "$@"
export PD_DEVICE
exec "$PD_PYTHON" -m tools.bench_prefix "$@"
