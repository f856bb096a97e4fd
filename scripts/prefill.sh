#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Starts one prefill engine. --help shows every flag, its environment variable and its default.
set -euo pipefail
ROLE=prefill
# shellcheck source=scripts/engine.sh
. "$(dirname "$0")/engine.sh"
engine_main "$@"
