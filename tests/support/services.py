"""For tests that start real services: free ports, waiting, and what to do when a program is missing."""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Callable

import pytest

HOST = "127.0.0.1"
#: Service packages put their daemons where a user's path does not look.
SBIN = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin", "/sbin"))


def free_port() -> int:
    """Return a TCP port of loopback that nothing listens on."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def wait_for(
    condition: Callable[[], object], what: str, log: Callable[[], str] = lambda: "", timeout: float = 30.0
) -> None:
    """Wait until ``condition`` holds; say ``what`` did not come about otherwise."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout:g} s for {what}\n{log()}")
        time.sleep(0.05)


def absent(why: str) -> None:
    """Skip the test; where everything has to be there, fail it."""
    if os.environ.get("CI") == "true":
        pytest.fail(why)
    pytest.skip(why)


def program(name: str) -> str:
    """Return the path of a program, or skip the test that needs it."""
    found = shutil.which(name, path=SBIN)
    if found is None:
        absent(f"not installed: {name} (scripts/ci_services.sh installs it)")
    assert found is not None
    return found
