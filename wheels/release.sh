#!/usr/bin/env bash
# A release up to its tag: builds and checks its files, tags the commit, and lists what would be
# uploaded. Nothing leaves this machine; pushing the tag starts .github/workflows/release.yml.
#
#     wheels/release.sh VERSION
set -euo pipefail
cd "$(dirname "$0")/.."
readonly version=$1 tag=v$1

refuse() { echo "release: $1" >&2; exit 2; }
[ -z "$(git status --porcelain)" ] ||
  refuse "there are changes that are not committed; commit or stash them first"
if git rev-parse --quiet --verify "refs/tags/$tag" >/dev/null; then
  refuse "the tag $tag exists; choose the next version"
fi
wheels/release_files.sh "$version"
git tag --annotate "$tag" --message "Tandem $version"
echo "release: tagged $tag. Dry run, these would be uploaded:"
(cd build/release && wc -c -- * | sed '$d')
echo "release: git push origin $tag has hosted CI build them again; it uploads if the variable PUBLISH is true"
