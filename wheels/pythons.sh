#!/usr/bin/env bash
# Do these Pythons run here, and are they 3.11 or newer? If not, says in one sentence which ones do:
#
#     wheels/pythons.sh PYTHON...
set -euo pipefail

is_usable() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

for python in "$@"; do
  is_usable "$python" && continue
  here=()
  # A name of pyenv's that is on the PATH need not run; its versions do.
  for candidate in python3 python3.{11..15} "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.*/bin/python3.1?; do
    if is_usable "$candidate"; then here+=("$candidate"); fi
  done
  echo "wheels: $python does not run here as Python 3.11 or newer; these do: ${here[*]:-none}; name one: make wheel PYTHON=${here[0]:-PATH}" >&2
  exit 2
done
