#!/usr/bin/env bash
# Builds and checks wheels if a commit since SINCE touches what they are built from:
#
#     wheels/commits.sh SINCE        SINCE is a commit, such as @{upstream} or HEAD~1
set -euo pipefail
cd "$(dirname "$0")/.."

readonly BUILT_FROM=(csrc wheels pyproject.toml CMakeLists.txt)
git rev-parse --quiet --verify "$1^{commit}" >/dev/null || {
  echo "check-commits: there is no commit $1 here; name the last one that is known to be good: make check-commits SINCE=HEAD~1" >&2
  exit 2
}
if [ -n "$(git status --porcelain -- "${BUILT_FROM[@]}")" ]; then
  echo "check-commits: ${BUILT_FROM[*]} have changes that are not committed; commit or stash them first" >&2
  exit 2
fi
commits=$(git log --format='  %h %s' "$1..HEAD" -- "${BUILT_FROM[@]}")
if [ -z "$commits" ]; then
  echo "check-commits: no commit since $1 touches ${BUILT_FROM[*]}"
  exit
fi
printf 'check-commits: a wheel is built and checked, because these commits touch %s:\n%s\n' "${BUILT_FROM[*]}" "$commits"
make --no-print-directory wheel
make --no-print-directory check-wheel
