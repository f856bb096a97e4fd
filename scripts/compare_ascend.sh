#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# This package's connector beside vllm-ascend's own two, under vllm-ascend itself on a CANN in host memory.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/setup.sh
. scripts/setup.sh

help() {
  cat <<'TEXT'
Starts three pairs one after the other, each behind the router that belongs to it: AscendPushConnector,
MooncakeLayerwiseConnector and MooncakeConnectorV1, P and D with TP 1 → 1, 2 → 1 and 1 → 2. Of each: right and wrong
answers, time to the first token, and at TP 1 → 1 what a client gets when P is killed before, during and after its
prefill, and when D is, and whether the other engine's blocks are free again. Prints one table.

usage: scripts/compare_ascend.sh [--only NAME,…] [--shape SHAPE,…] [--rounds N] [--again] [--write]

  --only    these connectors
  --shape   these sizes: 1to1, 2to1, 1to2
  --rounds  requests of each length
  --again   forget what earlier runs found (out/compare-ascend.json)
  --write   put the table into docs/migration.md

Makes .venv-ascend-host-0.23 if it is missing (docs/building.md). 40 to 60 minutes on two cores; the times to the first token
are those of an engine on two cores of a CPU, and say nothing about NPUs.
TEXT
}

if pd_wants_help "$@"; then
  help
  exit 0
fi
pd_setup test
tests/ascend_host/environment.sh 0.23 >/dev/null
exec "$PD_PYTHON" -m tools.compare_ascend "$@"
