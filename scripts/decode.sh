#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Starts one decode engine. --help shows every flag, its environment variable and its default.
set -euo pipefail
ROLE=decode
# shellcheck source=scripts/engine.sh
. "$(dirname "$0")/engine.sh"
engine_main "$@"
