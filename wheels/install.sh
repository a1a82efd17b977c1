#!/usr/bin/env bash
# Installs packages with an environment's pip, or says in one sentence which are not to be had:
#
#     wheels/install.sh ENVIRONMENT PACKAGE...
set -euo pipefail
environment=$1
shift
if ! said=$("$environment/bin/python" -m pip install --disable-pip-version-check -q "$@" 2>&1); then
  # The last line that pip calls an error is its reason.
  reason=$(grep '^ERROR' <<<"$said" | tail -n 1)
  echo "wheels: pip could not install $* (${reason#ERROR: }); connect to a package index, or name one in PIP_INDEX_URL" >&2
  exit 2
fi
