#!/usr/bin/env bash
# What a release of VERSION consists of, checked, in build/release: wheels, source distribution, an
# SBOM of what the wheel was checked with, and checksums:
#
#     wheels/release_files.sh VERSION
#
# BUILD_PYTHONS and CHECK_PYTHONS name the Pythons that wheels are built and checked with.
set -euo pipefail
cd "$(dirname "$0")/.."
readonly version=$1 out=build/release tools=build/release-tools
readonly BUILD_PYTHONS=${BUILD_PYTHONS:-python3.11 python3.12}
readonly CHECK_PYTHONS=${CHECK_PYTHONS:-python3.11 python3.12 python3.13}

refuse() { echo "release: $1" >&2; exit 2; }
[[ $version =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] ||
  refuse "the version '$version' is not three numbers; name one: make release VERSION=1.2.3"
grep -qx "version = \"$version\"" pyproject.toml ||
  refuse "pyproject.toml has another version than $version; change it there, and the wheel's name in docs/installing.md"
grep -q "^## $version - " CHANGELOG.md ||
  refuse "CHANGELOG.md has no section '## $version - DATE'; give the Unreleased section that name"
read -ra pythons <<<"$BUILD_PYTHONS $CHECK_PYTHONS"
wheels/pythons.sh "${pythons[@]}"

rm -rf build/wheels "$out"
mkdir -p "$out"
make --no-print-directory wheel WHEEL_PYTHONS="$BUILD_PYTHONS"
make --no-print-directory check-wheel WHEEL_PYTHONS="$CHECK_PYTHONS"
cp build/wheels/*.whl "$out"

"${pythons[0]}" -m venv "$tools"
wheels/install.sh "$tools" "build>=1.2" "cyclonedx-bom>=5" "twine>=6.1"
"$tools/bin/python" -m build --sdist --outdir "$out" . >/dev/null
"$tools/bin/cyclonedx-py" requirements build/wheels/checked-with.txt --pyproject pyproject.toml \
  --mc-type library --output-reproducible -o "$out/tandem_moe-$version.cdx.json"
"$tools/bin/twine" check --strict "$out"/*.whl "$out"/*.tar.gz
(cd "$out" && sha256sum -- * >SHA256SUMS)
