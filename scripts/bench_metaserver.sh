#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Measures the metaserver against instant engines, beside an example proxy (FastAPI, httpx) and nginx. --help for flags.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/setup.sh
. scripts/setup.sh

pd_setup run "$@"
if ! pd_wants_help "$@" && ! command -v nginx >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  apt-get install -y --no-install-recommends nginx-light >/dev/null || echo "nginx cannot be installed: left out" >&2
fi
exec "$PD_PYTHON" -m tools.bench_metaserver "$@"
