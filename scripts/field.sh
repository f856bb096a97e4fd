#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What vllm-ascend tests as P and D: would it start with this connector? docs/field.md is printed by it.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/setup.sh
. scripts/setup.sh

help() {
  cat <<'TEXT'
Reads the P/D configurations that vllm-ascend's own tests have, from its pinned source distribution (fetched by pip into
.cache, 15 MB, once), puts this connector in the place of theirs, and says of each engine: would start, or refused, with the
code and the reason of this package's admission. Nothing is started.

usage: scripts/field.sh [--write | --check] [--sdist FILE] [--no-setup]

  --write       write the tables into docs/field.md; exit code 1, and its name, when a configuration would no longer start
  --check       compare docs/field.md with what is printed now; exit code 1 when a configuration that would start no longer
                does, or the page is not what is printed
  --sdist FILE  the distribution, fetched before; where the package index cannot be reached
  --no-setup    do not check the installation first

Without --write and --check the tables go to stdout.
TEXT
}

install=1
arguments=()
for word in "$@"; do
  case $word in
    -h | --help)
      help
      exit 0
      ;;
    --no-setup) install= ;;
    *) arguments+=("$word") ;;
  esac
done
if [ -n "$install" ]; then pd_setup run; else pd_choose_interpreter; fi
exec "$PD_PYTHON" -m scripts.field "${arguments[@]}"
