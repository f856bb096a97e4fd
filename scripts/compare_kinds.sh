#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Kinds of caches with this package's connector and vLLM's own two, on the same tiny models: right, wrong, or refused.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/setup.sh
. scripts/setup.sh

help() {
  cat <<'TEXT'
Starts P and D of each model with each connector and asks them prompts whose right answers P says alone. Prints one
table.

usage: scripts/compare_kinds.sh [--only NAME,…] [--connector NAME,…] [--write] [--again]

  --only       these kinds, by the names of tools/compare_kinds.py
  --connector  these connectors
  --write      put the table into docs/kinds.md
  --again      forget what earlier runs found (out/compare-kinds.json)

NIXL is installed into out/nixl when it is not there, beside the environment. What cannot be installed is named as such.
About 80 s for a pair on two cores, 40 minutes for all. Pairs that ran with the same package do not run again. A kind
whose pairs have not all run keeps its line in docs/kinds.md.
TEXT
}

if pd_wants_help "$@"; then
  help
  exit 0
fi
pd_setup test
exec "$PD_PYTHON" -m tools.compare_kinds "$@"
