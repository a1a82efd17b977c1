#!/usr/bin/env bash
# Installs a wheel of each Python that is named into a new environment, and answers a prompt with the
# demo model there, with no compiler on the PATH:
#
#     wheels/check.sh OUT PYTHON...        OUT is what wheels/build.sh wrote to
#
# TORCH is what pip installs before it (torch==2.13.0).
set -euo pipefail
cd "$(dirname "$0")/.."

readonly OUT=$1 TORCH=${TORCH:-torch==2.13.0} PROMPT="Why is the sky blue?"
shift
wheels/pythons.sh "$@"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
unset PYTHONPATH

for python in "$@"; do
  new=$folder/$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
  "$python" -m venv "$new"
  # TORCH may hold options of pip's beside the name.
  # shellcheck disable=SC2086
  "$new/bin/pip" install --disable-pip-version-check -q $TORCH
  # pip chooses the wheel that fits this Python, as it does for a user.
  "$new/bin/pip" install --disable-pip-version-check -q --no-index --no-deps --find-links "$OUT" tandem-moe
  "$new/bin/pip" install --disable-pip-version-check -q "tandem-moe[demo]"
  "$new/bin/pip" list --disable-pip-version-check --format=freeze --exclude pip --exclude setuptools \
    --exclude tandem-moe >"$OUT/checked-with.txt" # the last Python's: the SBOM of a release
  for compiler in c++ g++ clang++ cc gcc clang zig cmake; do
    if PATH=$new/bin command -v "$compiler" >/dev/null; then
      echo "wheels: $new/bin has a $compiler; expected an environment without compilers" >&2
      exit 1
    fi
  done
  cd "$folder" # not the clone, whose sources would be found first
  env -i HOME="$HOME" ${TANDEM_CACHE:+TANDEM_CACHE="$TANDEM_CACHE"} PATH="$new/bin" \
    tandem run --quiet -p "$PROMPT" --max-new-tokens 8 --temperature 0 --json | tee answer
  tail -n 1 answer | "$new/bin/python" -c '
import json, sys, tandem.kernels._native as native
answer = json.load(sys.stdin)
assert answer["generated_tokens"] == 8 and answer["text"].strip(), answer
print("works:", sys.version.split()[0], native.__file__.rpartition("/")[2])'
  cd - >/dev/null
done
