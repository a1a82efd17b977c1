#!/usr/bin/env bash
# The kernels for 64-bit Arm (there: the portable ones), and their checks under qemu on this machine:
#
#     csrc/checks/arm.sh PYTHON        QEMU=qemu-aarch64-static
set -euo pipefail
cd "$(dirname "$0")/../.."

QEMU=${QEMU:-$(command -v qemu-aarch64-static || command -v qemu-aarch64 || true)}
[ -n "$QEMU" ] || {
  echo "check-arm: no qemu-aarch64 found; Debian, Ubuntu: apt install qemu-user-static" >&2
  exit 2
}
# musl, so that a program carries all its libraries.
compiler=$(wheels/compiler.sh "$1" aarch64-linux-musl build/arm-tools)
cmake -S csrc -B build/arm -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
  -DCMAKE_CXX_COMPILER="$compiler" -DCMAKE_BUILD_TYPE=Release -DTANDEM_CHECKS=ON \
  -DTANDEM_WARNINGS_ARE_ERRORS=ON >/dev/null
cmake --build build/arm --parallel 2 >/dev/null
for check in coordinator matmul kernels layers attention recurrent quantize tensors blocks crc32c; do
  "$QEMU" "build/arm/check_$check"
done
