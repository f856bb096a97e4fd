#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Prints the interpreter of an environment with the real torch_npu, for the tests of the NPU binding without an NPU.
#
# torch_npu needs an environment of its own: without CANN it breaks `import torch` in all other tests. This one holds
# torch_npu alone and sees the packages of the main environment, torch among them, behind its own. The second run finds
# everything by its stamp. Exit code 3: the main environment's torch is not the one that this torch_npu belongs to.
set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=scripts/setup.sh
. scripts/setup.sh

TORCH_NPU=2.13.0
COVERAGE=7.17.3

pd_choose_interpreter
main=$PD_PYTHON
venv=$PD_CACHE/npu-venv

facts=$("$main" -c 'import sysconfig, torch.version as v; print(v.__version__, sysconfig.get_path("purelib"))')
read -r torch packages <<<"$facts"
if [ "${torch%%+*}" != "$TORCH_NPU" ]; then
  pd_fail "torch $torch in $main: torch_npu $TORCH_NPU belongs to torch $TORCH_NPU" || exit 3
fi
stamp="$TORCH_NPU $COVERAGE $facts"

is_there() { [ -f "$venv/.stamp" ] && [ "$(<"$venv/.stamp")" = "$stamp" ]; }

make_venv() {
  pd_step "an environment beside $main" "$main" -m venv --clear --without-pip "$venv"
  pd_step "torch_npu $TORCH_NPU" "$main" -m pip --disable-pip-version-check --no-input --python "$venv/bin/python" \
    install --no-deps --no-compile --progress-bar off "torch_npu==$TORCH_NPU" "coverage==$COVERAGE"
  printf '%s\n' "$packages" >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/main.pth"
  printf '%s\n' "$stamp" >"$venv/.stamp"
}

mkdir -p "$PD_CACHE"
exec 9>"$PD_CACHE/npu-venv.lock"
flock -w "$PD_SETUP_LOCK_TIMEOUT" 9
is_there || make_venv
printf '%s\n' "$venv/bin/python"
