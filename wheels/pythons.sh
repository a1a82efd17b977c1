#!/usr/bin/env bash
# Do these Pythons run here, and are they 3.11 or newer? If not, says in one sentence which ones do:
#
#     wheels/pythons.sh [--with-headers] PYTHON...        headers: what compiling needs
set -euo pipefail

needs_headers=
[ "${1:-}" != --with-headers ] || { needs_headers=yes; shift; }

header_of() { "$1" -c 'import sysconfig; print(sysconfig.get_path("include"))'; }
is_usable() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

for python in "$@"; do
  if is_usable "$python"; then
    header=$(header_of "$python")/Python.h
    if [ -z "$needs_headers" ] || [ -e "$header" ]; then continue; fi
    echo "wheels: $python has no $header, which building needs; install it (Debian, Ubuntu: apt install python3-dev) or name another Python: make wheel PYTHON=PATH" >&2
    exit 2
  fi
  here=()
  # A name of pyenv's that is on the PATH need not run; its versions do.
  for candidate in python3 python3.{11..15} "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.*/bin/python3.1?; do
    if is_usable "$candidate"; then here+=("$candidate"); fi
  done
  echo "wheels: $python does not run here as Python 3.11 or newer; these do: ${here[*]:-none}; name one: make wheel PYTHON=${here[0]:-PATH}" >&2
  exit 2
done
