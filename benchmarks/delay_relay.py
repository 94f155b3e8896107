"""Relay between two hosts that delays each packet, see :mod:`benchmarks.network_namespaces`.

    python -m benchmarks.delay_relay MILLISECONDS HOST HOST

The interface ``eth0`` of each host is a TUN device of this process, because some kernels lack ``netem``. The process
prints a line when both interfaces exist, and runs until it is killed.
"""

import ctypes
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque
from contextlib import suppress

_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_MAX_PACKET_NUM_BYTES = 1 << 16


def open_interface(host: str, name: str = "eth0") -> int:
    """Creates an interface of a host. The calling thread moves to the network namespace of the host.

    Returns:
        Descriptor from which the packets that the host sends are read, and to which packets for the host are written.

    Raises:
        OSError: If this machine permits no TUN devices.
    """
    with open(f"/var/run/netns/{host}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {host}")
    interface = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(interface, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return interface


def relay(first: int, second: int, delay_s: float) -> None:
    """Passes the packets of each interface to the other one after a delay, in their order; does not return."""
    others = {first: second, second: first}
    waiting: deque[tuple[float, int, bytes]] = deque()
    while True:
        timeout_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for interface in select.select([*others], [], [], timeout_s)[0]:
            packet = os.read(interface, _MAX_PACKET_NUM_BYTES)
            waiting.append((time.monotonic() + delay_s, others[interface], packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, interface, packet = waiting.popleft()
            with suppress(OSError):  # the interface is down
                os.write(interface, packet)


def main() -> None:
    """Creates the interfaces and relays."""
    delay_ms, *hosts = sys.argv[1:]
    with suppress(AttributeError, PermissionError):  # before other processes, which would increase the delay
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    first, second = map(open_interface, hosts)
    print("ready", flush=True)
    relay(first, second, float(delay_ms) / 1e3)


if __name__ == "__main__":
    main()
