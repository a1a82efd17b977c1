#!/usr/bin/env bash
# README's "Install, and run" as it stands, in a Debian that has nothing else; needs root. Minutes:
#
#     wheels/debian.sh SUITE...        bookworm (Debian 12, Python 3.11) or trixie (13, Python 3.13)
#
# debootstrap makes the system in build/debian/SUITE, once. It sees pip's settings and certificates of
# this one, and the folders that BIND names (a local package index).
set -euo pipefail
cd "$(dirname "$0")/.."

if [ "$(id -u)" != 0 ] || ! command -v debootstrap >/dev/null; then
  echo "debian: needs root and debootstrap; expected both (apt-get install debootstrap)" >&2
  exit 2
fi
for suite in "$@"; do
  system=$PWD/build/debian/$suite
  if [ ! -e "$system/made" ]; then
    rm -rf "$system"
    debootstrap --variant=minbase --include=python3,python3-venv,python3-dev,ca-certificates,git,make \
      "$suite" "$system" http://deb.debian.org/debian >"$system.log"
    touch "$system/made"
  fi
  rm -rf "$system/tandem"
  git clone -q . "$system/tandem"
  cp /etc/resolv.conf "$system/etc/"
  # Mounts of a namespace of its own end with it.
  unshare --mount bash -euo pipefail -c '
    system=$1; shift
    for path in /proc /dev "$@"; do
      [ -e "$path" ] || continue
      if [ -d "$path" ]; then mkdir -p "$system$path"; else mkdir -p "$(dirname "$system$path")"; touch "$system$path"; fi
      mount --rbind "$path" "$system$path"
    done
    exec chroot "$system" bash -c "cd /tandem && wheels/try_readme.sh python3"' \
    bash "$system" /etc/pip.conf /etc/xdg/pip /etc/ssl/certs ${BIND:-}
  rm -rf "$system/tandem"
  echo "works in Debian $(cat "$system/etc/debian_version")"
done
