#!/usr/bin/env bash
# Install the services that tests start on loopback (Debian or Ubuntu, as root). Quick when they are there already.
set -euo pipefail

declare -A packages=(
    [promtool]=prometheus
    [gcc]="gcc libc6-dev"
    [slurmctld]=slurmctld
    [slurmd]=slurmd
    [slurmrestd]=slurmrestd
    [sinfo]=slurm-client
    [munged]=munge
)
missing=()
for command in "${!packages[@]}"; do
    if ! PATH=$PATH:/usr/sbin:/sbin command -v "$command" >/dev/null 2>&1; then
        # shellcheck disable=SC2206 # one command may need several packages
        missing+=(${packages[$command]})
    fi
done
if [ ${#missing[@]} -eq 0 ]; then
    echo "services: all installed"
    exit 0
fi
if [ "$(id -u)" != 0 ]; then
    echo "error: not installed, and not root: ${missing[*]}" >&2
    echo "cure: sudo apt-get install ${missing[*]}" >&2
    exit 1
fi
apt-get update -qq
# Nothing is to be started as a system service here: tests start their own.
printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d
chmod +x /usr/sbin/policy-rc.d
trap 'rm -f /usr/sbin/policy-rc.d' EXIT
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
echo "services: installed ${missing[*]}"
