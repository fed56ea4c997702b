#!/usr/bin/env bash
# Install what tests start on loopback (Debian or Ubuntu, as root): Slurm with slurmrestd and tokens, munge, Prometheus
# with promtool, Alertmanager with amtool, VictoriaMetrics with vmalert, PostgreSQL, Node.js with npm, Chromium, and a C
# compiler. Nothing is started or enabled here. Quick where all of them are there.
set -euo pipefail

PATH=$PATH:/usr/sbin:/usr/local/sbin:/sbin
packages=()
need() { command -v "$1" >/dev/null 2>&1 || packages+=("$2"); }
need slurmctld slurmctld
need slurmd slurmd
need slurmrestd slurmrestd
need squeue slurm-client
need munged munge
need prometheus prometheus
need promtool prometheus
need prometheus-alertmanager prometheus-alertmanager
need amtool prometheus-alertmanager
need victoria-metrics victoria-metrics
need vmalert victoria-metrics
need gcc gcc
need node nodejs
need npm npm
need chromium chromium
[ -e /usr/include/stdio.h ] || packages+=(libc6-dev)
# Its programs are in a folder of their own.
compgen -G '/usr/lib/postgresql/*/bin/initdb' >/dev/null || packages+=(postgresql)
# These have no command: JSON and scheduling plugins, and those for tokens.
for name in slurm-wlm-basic-plugins slurm-wlm-jwt-plugin; do
    dpkg-query -W -f '${Status}' "$name" 2>/dev/null | grep -q 'ok installed' || packages+=("$name")
done

if [ ${#packages[@]} -eq 0 ]; then
    echo "services: all installed"
    exit 0
fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    echo "error: not installed: ${packages[*]}" >&2
    echo "cure: sudo apt-get install ${packages[*]}" >&2
    exit 1
fi

# The packages start their services at once, with configurations that are not there. In a container there is no
# systemd to stop them, so that they must not start.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
    trap 'rm -f "$policy"' EXIT
fi

# Nor is a database cluster made, which nobody would use.
mkdir -p /etc/postgresql-common/createcluster.d
echo 'create_main_cluster = false' >/etc/postgresql-common/createcluster.d/none.conf

export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null
echo "services: installed ${packages[*]}"
