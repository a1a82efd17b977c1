#!/usr/bin/env bash
# Makes a C++ compiler for a target out of the PyPI package ziglang, which is Clang with the
# libraries of many systems, and prints the path of its command:
#
#     wheels/compiler.sh PYTHON TARGET DIR        DIR is where it is installed
set -euo pipefail
python=$1 target=$2
mkdir -p "$3"
dir=$(cd "$3" && pwd)

[ -x "$dir/bin/pip" ] || "$python" -m venv "$dir"
"$(dirname "$0")/install.sh" "$dir" "ziglang==0.17.*"
zig=$("$dir/bin/python" -c 'import pathlib, ziglang; print(pathlib.Path(ziglang.__file__).parent / "zig")')
printf '#!/bin/sh\nexec "%s" c++ -target %s "$@"\n' "$zig" "$target" >"$dir/c++-$target"
chmod +x "$dir/c++-$target"
echo "$dir/c++-$target"
