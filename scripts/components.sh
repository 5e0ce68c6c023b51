#!/usr/bin/env bash
# Install the Debian packages that some tests want. Silent and instant when all is there; never fails the build:
# what cannot be installed skips its tests, and this says which.
set -u
PATH=$PATH:/usr/sbin # where sshd is, also for people who are not root

declare -A skipped=(
  [radosgw]="S3 tests on Ceph" [ceph-mon]="S3 tests on Ceph" [ceph-osd]="S3 tests on Ceph" [ceph]="S3 tests on Ceph"
  [chromium]="reports opened in a browser" [fio]="comparison with fio" [strace]="tests that watch system calls"
  [sshd]="cluster facts over a real ssh"
)
declare -A package=(
  [radosgw]=radosgw [ceph-mon]=ceph-mon [ceph-osd]=ceph-osd [ceph]=ceph-common [chromium]=chromium
  [fio]=fio [strace]=strace [sshd]=openssh-server
)

missing_programs() {
  local program
  for program in "${!package[@]}"; do
    command -v "$program" > /dev/null || echo "$program"
  done
}

as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"; else sudo --non-interactive "$@"; fi
}

install_missing() {
  command -v apt-get > /dev/null || return 1
  as_root true 2> /dev/null || return 1
  local packages=() program
  for program in $(missing_programs); do packages+=("${package[$program]}"); done
  echo "Installing ${packages[*]} for the tests (a few minutes, once) ..."
  {
    as_root apt-get update --quiet
    # At run level 1 no service that comes with a package is started.
    as_root env DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 timeout 900 \
      apt-get install --yes --no-install-recommends "${packages[@]}"
  } > /dev/null 2>&1
}

[ -z "$(missing_programs)" ] && exit 0
install_missing
for program in $(missing_programs); do
  echo "No $program here: skipped are the ${skipped[$program]} (apt-get install ${package[$program]})."
done
exit 0
