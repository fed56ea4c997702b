#!/usr/bin/env bash
# Make a virtual environment at $1 with the first suitable Python; install what Debian splits off, where that is allowed.
set -euo pipefail

target=${1:?usage: scripts/venv.sh DIRECTORY}

suitable() {
    command -v "$1" >/dev/null 2>&1 && "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

python=
for candidate in ${PYTHON:-} python3 python3.13 python3.12 python3.11; do
    if suitable "$candidate"; then
        python=$candidate
        break
    fi
done
if [ -z "$python" ]; then
    echo "error: no Python 3.11 or later found" >&2
    echo "cure: install one (apt-get install python3 on Debian 12, Ubuntu 24.04 or later), or set PYTHON" >&2
    exit 1
fi

if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
        echo "error: $python cannot make virtual environments" >&2
        echo "cure: sudo apt-get install python$version-venv" >&2
        exit 1
    fi
    echo "installing python$version-venv"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "python$version-venv" >/dev/null
fi

echo "creating $target with $("$python" --version)"
"$python" -m venv --clear "$target"
