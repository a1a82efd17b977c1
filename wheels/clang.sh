#!/usr/bin/env bash
# Does the wheels' compiler, which is Clang, take all of csrc? Syntax and types alone, with vector
# kernels of a format of each kind, as compiling takes minutes; make check-wheel compiles:
#
#     [CHECKS=OFF] [BUILD=FOLDER] wheels/clang.sh PYTHON     PYTHON has its headers, 3.11 or newer
set -euo pipefail
cd "$(dirname "$0")/.."

python=$1
tools=build/wheel-tools/$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
compiler=$(wheels/compiler.sh "$python" x86_64-linux-gnu.2.28 "$tools")
wheels/install.sh "$tools" "nanobind>=2.4"

# CMake's rules write empty objects, libraries and programs: a second run looks at changed files only.
# -E keeps zig from waiting for an object, and -c from linking what CMake asks compilers for, before
# which it would compile the C++ library. Python's headers define what newer glibc defines too.
empty="<CMAKE_COMMAND> -E touch"
cmake -S . -B "${BUILD:-build/clang}" -DTANDEM_CHECKS=${CHECKS:-ON} -DTANDEM_WARNINGS_ARE_ERRORS=ON \
  -DCMAKE_CXX_COMPILER="$compiler" -DPython_EXECUTABLE="$PWD/$tools/bin/python" \
  -DCMAKE_TRY_COMPILE_TARGET_TYPE=STATIC_LIBRARY -DCMAKE_CXX_FLAGS='-Wno-macro-redefined -DTANDEM_FORMATS_OF_EACH_KIND -c' \
  -DCMAKE_CXX_COMPILE_OBJECT="<CMAKE_CXX_COMPILER> <DEFINES> <INCLUDES> <FLAGS> -E -Xclang -fsyntax-only -o <OBJECT> <SOURCE>;$empty <OBJECT>" \
  -DCMAKE_CXX_CREATE_STATIC_LIBRARY="$empty <TARGET>" -DCMAKE_CXX_LINK_EXECUTABLE="$empty <TARGET>" \
  -DCMAKE_CXX_CREATE_SHARED_MODULE="$empty <TARGET>" >/dev/null
cmake --build "${BUILD:-build/clang}" --parallel 2 >/dev/null
