#!/usr/bin/env bash
# The lines of README's "Install, and run" as they stand: in a new clone of the last commit, with a new
# home and no environment. Takes minutes, and downloads what a user downloads:
#
#     wheels/try_readme.sh PYTHON
#
# How pip and zig reach what they need (PIP_*, ZIG_*, proxies, certificates) is taken from here.
set -euo pipefail
cd "$(dirname "$0")/.."

wheels/pythons.sh "$1"
readonly folder=$PWD/build/try-readme
rm -rf "$folder"
mkdir -p "$folder/bin" "$folder/home"
ln -s "$("$1" -c 'import sys; print(sys.executable)')" "$folder/bin/python3"
git clone -q . "$folder/tandem"
cd "$folder/tandem"

lines=$(sed -n '/^## Install, and run/,/^## /s/^    //p' README.md)
[ -n "$lines" ] || { echo "try-readme: README.md has no lines below Install, and run" >&2; exit 1; }
network=()
for name in $(compgen -e | grep -E '^(PIP_|ZIG_|SSL_|TANDEM_DEMO_SOURCE$)|_(proxy|PROXY)$' || true); do
  network+=("$name=${!name}")
done
env -i HOME="$folder/home" PATH="$folder/bin:/usr/local/bin:/usr/bin:/bin" "${network[@]}" \
  bash -euxo pipefail -c "$lines"
echo "works: $("$folder/bin/python3" --version)"
rm -rf "$folder"
