"""The system calls that end a program in the sandbox at once, as a filter for the kernel.

The filter is classic BPF over `struct seccomp_data` (linux/seccomp.h). A program has no business
with processes, networks, mounts, keys, other processes' memory or memory outside of its own address
space, so that a call of these kinds is a verdict: the kernel ends it with SIGSYS.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

from batchgen.util.errors import ConfigError

# Operations of BPF: load a word of `seccomp_data`; compare it with a value (equal, at least, common
# bits) and jump; return.
_LOAD, _EQUAL, _AT_LEAST, _HAS_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
# What the filter returns: kill the process, fail with ENOSYS ("no such call"), or allow the call.
_KILL, _NOT_THERE, _ALLOW = 0x8000_0000, 0x0005_0000 | 38, 0x7FFF_0000  # 38: ENOSYS
# The offsets in `seccomp_data`, in bytes: the number of the call, the architecture, and the low
# half of the first argument.
_NUMBER_AT, _ARCHITECTURE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
_CLONE_THREAD = 0x10000  # the flag of `clone` that makes a thread
_CLONE3 = 435  # the same number on both architectures
_X32 = 0x4000_0000
"""Numbers from here on belong to another ABI of x86-64."""
_ARCHITECTURES: Mapping[str, tuple[int, int]] = {
    "x86_64": (0xC000_003E, 0),
    "aarch64": (0xC000_00B7, 1),
}
"""By machine: the kernel's number of the architecture, and the index of its system call numbers in
_CALLS."""
_CLONE = (56, 220)  # the numbers of `clone` on x86-64 and on ARM
_CALLS: Mapping[str, tuple[int | None, int | None]] = {
    "fork": (57, None),
    "vfork": (58, None),
    "execveat": (322, 281),
    "kill": (62, 129),
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "socket": (41, 198),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "quotactl": (179, 60),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "personality": (135, 92),
    "syslog": (103, 116),
    "acct": (163, 89),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
}
"""The numbers of forbidden calls on x86-64 and on ARM; None if there is no such call."""


def seccomp_filter(machine: str) -> bytes:
    """The filter for a kind of machine, see `platform.machine()`.

    Raises:
        ConfigError: the numbers of its system calls are not known here.
    """
    if machine not in _ARCHITECTURES:
        raise ConfigError(
            f"RunTests: programs run only on {' and '.join(_ARCHITECTURES)}, and this machine is "
            f"{machine}"
        )
    architecture, offset = _ARCHITECTURES[machine]
    numbers = [by_architecture[offset] for by_architecture in _CALLS.values()]
    # Each line: operation, value, and whether to go on, to allow, to kill or to say "not there",
    # where the value fits and where it does not.
    lines = [(_LOAD, _ARCHITECTURE_AT, "", ""), (_EQUAL, architecture, "", "kill")]
    lines += [(_LOAD, _NUMBER_AT, "", ""), (_AT_LEAST, _X32, "kill", "")]
    lines += [(_EQUAL, number, "kill", "") for number in numbers if number is not None]
    # Threads are made by clone; the C library tries clone3 first, whose arguments are hidden.
    lines += [(_EQUAL, _CLONE3, "missing", ""), (_EQUAL, _CLONE[offset], "", "allow")]
    lines += [(_LOAD, _FIRST_ARGUMENT_AT, "", ""), (_HAS_BITS, _CLONE_THREAD, "allow", "kill")]
    ends = {"allow": len(lines), "kill": len(lines) + 1, "missing": len(lines) + 2}
    code = b""
    for at, (operation, value, fits, fits_not) in enumerate(lines):
        jumps = (ends[to] - at - 1 if to else 0 for to in (fits, fits_not))
        code += struct.pack("<HBBI", operation, *jumps, value)
    for value in (_ALLOW, _KILL, _NOT_THERE):
        code += struct.pack("<HBBI", _RETURN, 0, 0, value)
    return code
