#!/usr/bin/env bash
# README's first two commands: those of a clone, or, once a package index has Tandem, those of pip:
#
#     wheels/readme.sh clone|index
set -euo pipefail
cd "$(dirname "$0")/.."
readonly lines=wheels/readme-${1:-}.md begin='<!-- first commands -->' end='<!-- / -->'

[ -f "$lines" ] || { echo "readme: '${1:-}' is neither clone nor index" >&2; exit 2; }
if [ "$(grep -cxF -e "$begin" -e "$end" README.md)" != 2 ]; then
  echo "readme: README.md lacks the lines '$begin' and '$end', once each" >&2
  exit 2
fi
sed -i -e "\\|^$begin\$|,\\|^$end\$|{\\|^$begin\$|!{\\|^$end\$|!d}}" -e "\\|^$begin\$|r $lines" README.md
