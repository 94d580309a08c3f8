"""Bits of the daemon's GPU tier are flipped through its own descriptors, by CUDA's driver API. Root, or ptrace of the daemon, is needed."""

from __future__ import annotations

import ctypes
import os
import random

import faults

SLAB = 256 << 20  # gpu.slab_size
PIDFD_GETFD = 438  # the system call
POSIX_FD, ON_DEVICE, READ_WRITE = 1, 1, 3


class Access(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("device", ctypes.c_int), ("flags", ctypes.c_int)]


class Driver:
    def __init__(self) -> None:
        self.cuda, self.device = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
        context = ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(self.device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self.device)
        self.call("cuCtxSetCurrent", context)

    def call(self, name: str, *arguments: object) -> None:
        if error := getattr(self.cuda, name)(*arguments):
            raise RuntimeError(f"{name}: error {error}")

    def flip(self, fd: int, drawn: random.Random) -> int:
        """A slab. 0: the descriptor is of no memory of a GPU."""
        handle, base, size = ctypes.c_ulonglong(), ctypes.c_ulonglong(), ctypes.c_size_t(SLAB)
        if self.cuda.cuMemImportFromShareableHandle(ctypes.byref(handle), ctypes.c_void_p(fd), POSIX_FD):
            return 0
        self.call("cuMemAddressReserve", ctypes.byref(base), size, ctypes.c_size_t(0), ctypes.c_ulonglong(0), ctypes.c_ulonglong(0))
        self.call("cuMemMap", base, size, ctypes.c_size_t(0), handle, ctypes.c_ulonglong(0))
        self.call("cuMemSetAccess", base, size, ctypes.byref(Access(ON_DEVICE, self.device.value, READ_WRITE)), ctypes.c_size_t(1))
        host = bytearray(SLAB)
        at = (ctypes.c_char * SLAB).from_buffer(host)
        self.call("cuMemcpyDtoH_v2", at, base, size)
        flipped = faults.flip(host, drawn)
        self.call("cuMemcpyHtoD_v2", base, at, size)
        self.call("cuMemUnmap", base, size)
        self.call("cuMemAddressFree", base, size)
        self.call("cuMemRelease", handle)
        return flipped


def flip_bits(pid: int, seed: int) -> int:
    """Returns how many."""
    driver, drawn, flipped = Driver(), random.Random(seed), 0
    libc, pidfd = ctypes.CDLL(None, use_errno=True), os.pidfd_open(pid)
    for name in os.listdir(f"/proc/{pid}/fd"):
        if "nvidia" not in os.readlink(f"/proc/{pid}/fd/{name}"):
            continue
        fd = libc.syscall(PIDFD_GETFD, pidfd, int(name), 0)
        if fd < 0:
            raise OSError(ctypes.get_errno(), "pidfd_getfd")
        flipped += driver.flip(fd, drawn)
        os.close(fd)
    os.close(pidfd)
    return flipped
