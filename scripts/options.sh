#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Flags of the scripts that start things: one table per script gives parsing, environment, defaults and --help.
#
# A table is the array OPTIONS of lines  name|ENVIRONMENT|default|meaning.  A name with * may be given again and
# collects its values (in the environment: separated by blanks); a name with ! is a switch without a value.
# A meaning =SETTING is a setting of the package (a key of the connector, or a flag of the metaserver with its --).
# Its meaning, and its default unless the line has another, stand in the tables of docs/configuration.md, which the
# declarations in Python print; only --help reads them. So a line without a default passes on only what is given, and
# the setting's own default applies; a line with one passes that on.
# After options_parse, OPT[name] holds each value (a switch: 1 or empty) and REST what came after --.

declare -A OPT=()
REST=()
OPTIONS_PAGE=$(dirname "${BASH_SOURCE[0]}")/../docs/configuration.md

options_help() {
  local line name variable default meaning shown _
  local -A defaults=() meanings=()
  while IFS='|' read -r _ name default _ meaning _; do
    name=${name//[\` ]/} default=${default//[\`\" ]/}
    defaults[$name]=${default#–}
    meaning=${meaning# } meaning=${meaning% }
    meanings[$name]=${meaning//\`/}
  done < <(grep '^| `' "$OPTIONS_PAGE")
  for line in "${OPTIONS[@]}"; do
    IFS='|' read -r name variable default meaning <<<"$line"
    if [[ $meaning == =* ]]; then default=${default:-${defaults[${meaning#=}]}} meaning=${meanings[${meaning#=}]}; fi
    meaning=${meaning% (metaserver only)}
    case $name in
      *!) shown="--${name%!}" ;;
      *\*) shown="--${name%\*} VALUE (again for more)" ;;
      *) shown="--$name VALUE" ;;
    esac
    printf '  %s\n        %s\n' "$shown" "$meaning"
    if [ "${name: -1}" != '!' ]; then printf '        [%s, default: %s]\n' "$variable" "${default:-not set}"; fi
  done
}

# The full spelling of a flag's name in the table: with its mark, if it has one.
options_find() {
  local line name
  for line in "${OPTIONS[@]}"; do
    name=${line%%|*}
    if [ "${name%[\*!]}" = "$1" ]; then
      printf '%s\n' "$name"
      return 0
    fi
  done
  return 1
}

options_refuse() {
  printf '%s: %s (see --help)\n' "$(basename "$0")" "$1" >&2
  exit 2
}

options_parse() {
  local line name variable default meaning flag value full given=()
  for line in "${OPTIONS[@]}"; do
    IFS='|' read -r name variable default meaning <<<"$line"
    OPT[${name%[\*!]}]=$default
    if [ -n "$variable" ] && [ -n "${!variable:-}" ]; then OPT[${name%[\*!]}]=${!variable}; fi
    if [ "${name: -1}" = '!' ] && [ "${OPT[${name%!}]}" = 0 ]; then OPT[${name%!}]=; fi
  done
  while [ $# -gt 0 ]; do
    flag=$1
    shift
    case $flag in
      --)
        REST=("$@")
        break
        ;;
      --*=*) value=${flag#*=} flag=${flag%%=*} ;;
      --*) unset value ;;
      *) options_refuse "unexpected argument $flag" ;;
    esac
    flag=${flag#--}
    full=$(options_find "$flag") || options_refuse "unknown flag --$flag"
    if [ "${full: -1}" = '!' ]; then
      [ -z "${value+given}" ] || options_refuse "--$flag takes no value"
      OPT[$flag]=1
      continue
    fi
    if [ -z "${value+given}" ]; then
      [ $# -gt 0 ] || options_refuse "--$flag needs a value"
      value=$1
      shift
    fi
    if [ "${full: -1}" = '*' ] && [[ " ${given[*]} " == *" $flag "* ]]; then value="${OPT[$flag]} $value"; fi
    OPT[$flag]=$value
    given+=("$flag")
  done
}

options_need_number() { # names
  local name
  for name in "$@"; do
    [[ ${OPT[$name]} =~ ^[0-9]+$ ]] || options_refuse "--$name ${OPT[$name]}: a whole number is wanted"
  done
}

# The command as one line that a shell can read back.
options_show() {
  local word line=''
  for word in "$@"; do
    if [[ $word =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]]; then line+=" $word"; else line+=" '${word//\'/\'\\\'\'}'"; fi
  done
  printf '%s\n' "${line# }"
}
