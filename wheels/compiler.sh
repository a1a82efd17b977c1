#!/usr/bin/env bash
# Makes a C++ compiler for a target, with ar and ranlib beside it, out of the PyPI package ziglang, which is Clang with the
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
# Debian's Python.h includes its pyconfig.h by a path below /usr/include, where this compiler does not look.
include=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
debian=$(dirname "$include")/x86_64-linux-gnu/$(basename "$include")
mkdir -p "$dir/include/x86_64-linux-gnu"
[ ! -d "$debian" ] || ln -sfn "$debian" "$dir/include/x86_64-linux-gnu/"
printf '#!/bin/sh\nexec "%s" c++ -target %s -idirafter "%s" "$@"\n' "$zig" "$target" "$dir/include" >"$dir/c++-$target"
for tool in ar ranlib; do
  printf '#!/bin/sh\nexec "%s" %s "$@"\n' "$zig" "$tool" >"$dir/$tool"
done
chmod +x "$dir/c++-$target" "$dir/ar" "$dir/ranlib"
echo "$dir/c++-$target"
