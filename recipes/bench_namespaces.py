"""Two hosts with a slow link between them, on one machine: a process in a network namespace of its own on either end.

The namespaces have no names. They end with the processes that have them, so that nothing is left behind, however the
benchmark ends. Making them takes Linux, root's rights, and the commands `unshare`, `nsenter`, `ip` and `tc`.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

__all__ = ["ADDRESSES", "DEVICE", "NoLink", "run_on_two_hosts"]

ADDRESSES = ("10.77.0.1", "10.77.0.2")  # nobody else is in their network
DEVICE = "slow0"
# Of the token bucket. More than a segment that the kernel hands down at once, and a small part of what is sent.
_BURST = "32kb"
_QUEUE = "1mb"


class NoLink(Exception):
    """This machine, or this user, cannot have two hosts; says why."""


def run_on_two_hosts(
    command: Sequence[str], messages: Sequence[str], *, mbit: float, timeout: float, env: Mapping[str, str]
) -> None:
    """Run a command on each of two hosts, until both have ended.

    Args:
        command: The program and its arguments.
        messages: What either gets on its standard input, once the link is up.
        mbit: Rate of the link in either direction, in Mbit/s.
        timeout: Seconds until the commands are ended.
        env: Environment variables, beside those of this process.

    Raises:
        NoLink: The hosts cannot be made here.
        RuntimeError: A command failed. The other one is ended.
        TimeoutError: They were not done in time.
    """
    with _hosts(command, env) as hosts:
        _connect(hosts, mbit)
        for host, message in zip(hosts, messages, strict=True):
            if host.stdin is not None:
                host.stdin.write(message)
                host.stdin.close()
        deadline = time.monotonic() + timeout
        while None in (ended := [host.poll() for host in hosts]) and not any(ended):
            if time.monotonic() >= deadline:
                raise TimeoutError(f"the hosts were not done within {timeout:g} s")
            time.sleep(0.02)
        failed = [number for number, host in enumerate(hosts) if host.returncode]
        if failed:
            raise RuntimeError(f"host {failed[0]} failed; what it wrote stands above")


@contextmanager
def _hosts(command: Sequence[str], env: Mapping[str, str]) -> Iterator[list["subprocess.Popen[str]"]]:
    """The two processes, each in its namespace; ended in any case."""
    if sys.platform != "linux":
        raise NoLink(f"network namespaces are Linux's, this is {sys.platform}")
    hosts: list[subprocess.Popen[str]] = []
    kept: list[int] = []  # what is open stays: neither host loses the link because the other one has ended
    try:
        for _ in ADDRESSES:
            try:
                host = subprocess.Popen(
                    ["unshare", "--net", *command], env={**os.environ, **env}, stdin=subprocess.PIPE, text=True
                )
            except FileNotFoundError as error:
                raise NoLink("there is no command 'unshare' (util-linux)") from error
            hosts.append(host)
        for host in hosts:
            kept.append(_moved(host))
        yield hosts
    finally:
        for namespace in kept:
            os.close(namespace)
        for host in hosts:
            if host.poll() is None:
                host.kill()
            host.wait()
            if host.stdin is not None and not host.stdin.closed:
                try:
                    host.stdin.close()
                except BrokenPipeError:  # it ended before it had read
                    pass


def _moved(host: "subprocess.Popen[str]") -> int:
    """Wait until a process is in its own namespace, for it starts in this one; returns the namespace, opened."""
    here, path = os.stat("/proc/self/ns/net").st_ino, f"/proc/{host.pid}/ns/net"
    while host.poll() is None:
        try:
            opened = os.open(path, os.O_RDONLY)
        except OSError:  # it has just ended
            continue
        if os.fstat(opened).st_ino != here:
            return opened
        os.close(opened)
        time.sleep(0.005)
    raise NoLink("this user may not make network namespaces (root may)")


def _connect(hosts: Sequence["subprocess.Popen[str]"], mbit: float) -> None:
    first, second = (str(host.pid) for host in hosts)
    _do("ip", "link", "add", DEVICE, "netns", first, "type", "veth", "peer", "name", DEVICE, "netns", second)
    for host, address in zip(hosts, ADDRESSES, strict=True):
        inside = ("nsenter", "--target", str(host.pid), "--net", "--")
        limit = ("rate", f"{mbit:g}mbit", "burst", _BURST, "limit", _QUEUE)
        _do(*inside, "ip", "address", "add", f"{address}/24", "dev", DEVICE)
        _do(*inside, "ip", "link", "set", "lo", "up")  # a host calls itself by its own address too
        _do(*inside, "ip", "link", "set", DEVICE, "up")
        _do(*inside, "tc", "qdisc", "add", "dev", DEVICE, "root", "tbf", *limit)


def _do(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise NoLink(f"there is no command {command[0]!r} (iproute2 and util-linux have them)") from error
    if done.returncode:
        raise NoLink(f"{' '.join(command)}: {done.stderr.strip() or f'exit status {done.returncode}'}")
