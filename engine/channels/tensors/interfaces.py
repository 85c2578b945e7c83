"""Which network interface of this host has an address, as gloo and NCCL have to be told.

Owns: this question, asked of the C library. Does not own: addresses (the cluster), binding.
"""

from __future__ import annotations

import ctypes
import ipaddress
import socket
from collections.abc import Iterator

from dataflow.errors import RunError

LOOPBACK = "lo"
_IPV4_AT, _IPV6_AT = 4, 8
"""Where the address lies in a sockaddr_in and a sockaddr_in6."""


class _Interface(ctypes.Structure):
    """The C library's `struct ifaddrs`, as far as it is read."""


_Interface._fields_ = [
    ("next", ctypes.POINTER(_Interface)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
]


def interface_of(address: str) -> str:
    """The interface with this IP address. Raises RunError if none of this host has it."""
    wanted = ipaddress.ip_address(address)
    if wanted.is_loopback:
        return LOOPBACK  # which has all of 127.0.0.0/8
    addresses = list(_addresses())
    for name, each in addresses:
        if each == wanted:
            return name
    shown = ", ".join(f"{name} {each}" for name, each in addresses)
    fix = "Fix: the address that the cluster gives this host."
    raise RunError(f"expected a network interface with {address}, found {shown}. {fix}")


def _addresses() -> Iterator[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    """Each IP address of this host, and the interface that has it."""
    library = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_Interface)()
    if library.getifaddrs(ctypes.byref(first)) != 0:
        raise RunError("the network interfaces of this host cannot be listed")
    try:
        at = first
        while at:
            entry = at.contents
            if entry.address and (address := _ip(entry.address)) is not None:
                yield entry.name.decode(), address
            at = entry.next
    finally:
        library.freeifaddrs(first)


def _ip(at: int) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address of a sockaddr; None for another family."""
    family = ctypes.c_ushort.from_address(at).value
    if family == socket.AF_INET:
        return ipaddress.IPv4Address(ctypes.string_at(at + _IPV4_AT, 4))
    if family == socket.AF_INET6:
        return ipaddress.IPv6Address(ctypes.string_at(at + _IPV6_AT, 16))
    return None
