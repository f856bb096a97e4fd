#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Sourced by the scripts here, from the project's root: exports what ascend.env has and the caller has not set itself.
while IFS= read -r setting; do
  if [[ $setting =~ ^([A-Z_]+)=(.*)$ ]] && [ -z "${!BASH_REMATCH[1]+set}" ]; then export "${setting?}"; fi
done <examples/ascend.env

# as_addresses VARIABLE…: names of hosts in these variables become addresses. HCCL takes no names, and the metaserver's
# address must be the same word for it and for D.
as_addresses() {
  local variable host found all
  for variable in "$@"; do
    all=()
    for host in ${!variable}; do
      found=$host
      if [[ $host != *:* ]] && ! found=$(getent ahostsv4 "$host"); then
        echo "$host: no address is known for this name" >&2
        exit 2
      fi
      all+=("${found%% *}")
    done
    printf -v "$variable" '%s' "${all[*]}"
  done
}

# on_several_hosts ADDRESS: HCCL and gloo take the network of this host's ADDRESS, unless the caller names another one.
# Left alone, each takes the first that it finds, which may be the one for management.
on_several_hosts() {
  local interface=
  if command -v ip >/dev/null; then interface=$(ip -o address show to "$1" | awk '{print $2; exit}'); fi
  if [ -z "$interface" ]; then
    echo "$1 is not found on this host: HCCL_IF_IP, HCCL_, GLOO_ and TP_SOCKET_IFNAME are as you set them" >&2
    return
  fi
  export HCCL_IF_IP="${HCCL_IF_IP:-$1}" HCCL_SOCKET_IFNAME="${HCCL_SOCKET_IFNAME:-$interface}" \
    GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$interface}" TP_SOCKET_IFNAME="${TP_SOCKET_IFNAME:-$interface}"
}
