"""Runs a program that a model wrote, with nothing that it does not need: `python -I -S sandbox.py REQUEST REPORT`.

The two arguments are file descriptors. The request is JSON: {"code", "tests", "word", "timeout_s", "memory_bytes"};
the report is one, too: {"missing": [...], "passed": [...], "word": ...}. Tests are statements that run after the code,
in its namespace; with `tests` null the code is a program that reads stdin and writes stdout. Everything is given up
before the code is compiled, and is given up for good: by the kernel, not by Python. The standard library only; it
imports nothing of ours.
"""

import contextlib
import ctypes
import json
import os
import resource
import signal
import struct
import sys
import types

NOBODY = 65534
FILE_BYTES = 16 << 20  # the largest file, and the most that is printed
THREADS = 256
CAP_DAC_READ_SEARCH = 1 << 2
PR_SET_PDEATHSIG, PR_SET_KEEPCAPS, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 8, 22, 38
CLONE_NEWUSER, CLONE_THREAD = 0x10000000, 0x10000
EPERM, ENOSYS = 1, 38

LIBC = ctypes.CDLL(None, use_errno=True)

# system calls (x86_64, aarch64) that a program has no need of; None: there is no such call
DENIED = {
    # the network, other programs and other processes
    **{"socket": (41, 198), "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281)},
    **{"setsid": (112, 157), "setpgid": (109, 154), "ptrace": (101, 117), "kcmp": (312, 272)},
    **{"process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "process_madvise": (440, 440)},
    **{"tkill": (200, 130), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240)},
    **{"pidfd_open": (434, 434), "pidfd_send_signal": (424, 424), "pidfd_getfd": (438, 438)},
    **{"setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setattr": (314, 274)},
    **{"sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119), "sched_setparam": (142, 118)},
    **{"migrate_pages": (256, 238), "move_pages": (279, 239)},
    # what would outlive the program, or hold memory that its limit does not count
    **{"shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180)},
    **{"memfd_create": (319, 279), "memfd_secret": (447, 447), "io_uring_setup": (425, 425)},
    **{"add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219)},
    # files of others: Landlock does not cover their attributes
    **{"chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452)},
    **{"chown": (92, None), "lchown": (94, None), "fchown": (93, 55), "fchownat": (260, 54)},
    **{"utime": (132, None), "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88)},
    **{"setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "setxattrat": (463, 463)},
    **{"removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16), "removexattrat": (466, 466)},
    **{"mknod": (133, None), "mknodat": (259, 33), "mkdir": (83, None), "mkdirat": (258, 34)},
    **{"link": (86, None), "linkat": (265, 37), "symlink": (88, None), "symlinkat": (266, 36)},
    **{"open_by_handle_at": (304, 265), "fanotify_init": (300, 262)},
    # the kernel itself
    **{"unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "chroot": (161, 51)},
    **{"pivot_root": (155, 41), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430)},
    **{"bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "personality": (135, 92)},
}
CALLS = {"kill": (62, 129), "tgkill": (234, 131), "prlimit64": (302, 261), "clone": (56, 220), "clone3": (435, 435)}
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def confine(timeout_s: float, memory_bytes: int) -> list[str]:
    """Limit this process and cut it off, for good. Returns what the platform does not let us have."""
    missing = []
    for name, limit in (
        ("CPU", int(timeout_s) + 1),
        ("AS", memory_bytes),
        ("FSIZE", FILE_BYTES),
        ("NOFILE", 64),
        ("CORE", 0),
    ):
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    landlock = LIBC.syscall(444, None, 0, 1)
    if not _own_user(landlock > 0):
        missing.append("a limit on threads")
    LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if landlock <= 0 or not _landlock(landlock):
        missing.append("a ban on files outside the scratch folder (Landlock)")
    if not _seccomp():
        missing.append("a ban on network and processes (seccomp)")
    return missing


def _own_user(landlock: bool) -> bool:
    """Be a user whose threads are counted apart: nobody if we are root, else ourselves in a user namespace.

    Root keeps the right to read, which Landlock then narrows: the interpreter may lie in a folder of root's own.
    """
    keep = CAP_DAC_READ_SEARCH if landlock else 0
    if os.getuid() == 0:
        try:
            os.chown(".", NOBODY, NOBODY)
            LIBC.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0)
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            separate = True
        except OSError:  # root of a container without these rights
            separate = False
    else:
        separate, keep = LIBC.unshare(CLONE_NEWUSER) == 0, 0
    header, none = struct.pack("Ii", 0x20080522, 0), struct.pack("6I", keep, keep, 0, 0, 0, 0)
    LIBC.capset(ctypes.c_char_p(header), ctypes.c_char_p(none))
    if separate:
        resource.setrlimit(resource.RLIMIT_NPROC, (THREADS, THREADS))
    return separate


def _landlock(version: int) -> bool:
    """Read the interpreter and its libraries, keep flat files in the current folder, and touch no other file."""
    WRITE, READ, READ_DIR, REMOVE_FILE, MAKE_FILE, REFER, TRUNCATE = (1 << bit for bit in (1, 2, 3, 5, 8, 13, 14))
    every = (1 << 13) - 1 | (REFER if version >= 2 else 0) | (TRUNCATE if version >= 3 else 0)
    files = WRITE | READ | (TRUNCATE if version >= 3 else 0)
    net, scoped = (3 if version >= 4 else 0), (3 if version >= 6 else 0)  # TCP; abstract sockets and signals
    attributes = struct.pack("QQQ", every, net, scoped)[: 8 if version < 4 else 16 if version < 6 else 24]
    ruleset = LIBC.syscall(444, ctypes.c_char_p(attributes), len(attributes), 0)
    if ruleset < 0:
        return False
    allowed = {path: READ | READ_DIR for path in (sys.base_prefix, "/usr", "/lib", "/lib64") if os.path.isdir(path)}
    allowed |= {"/etc/ld.so.cache": READ, "/etc/localtime": READ, "/dev/null": files, "/dev/urandom": READ}
    allowed["."] = files | READ_DIR | REMOVE_FILE | MAKE_FILE
    for path, access in allowed.items():
        if os.path.exists(path):
            folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
            rule = struct.pack("=Qi", access, folder)
            LIBC.syscall(445, ruleset, 1, ctypes.c_char_p(rule), 0)
            os.close(folder)
    done = LIBC.syscall(446, ruleset, 0) == 0
    os.close(ruleset)
    return done


def _seccomp() -> bool:
    """Deny, with EPERM, the calls in DENIED, and signals, limits and processes but our own. Threads stay."""
    machine = os.uname().machine
    if machine not in AUDIT_ARCH:
        return False
    column = list(AUDIT_ARCH).index(machine)
    LOAD, EQUAL, AT_LEAST, BITS, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
    ALLOW, KILL, DENY = 0x7FFF0000, 0x80000000, 0x00050000 | EPERM
    number, arch, argument = 0, 4, 16  # offsets in struct seccomp_data; of the first argument its lower half
    program = [(LOAD, 0, 0, arch), (EQUAL, 1, 0, AUDIT_ARCH[machine]), (RETURN, 0, 0, KILL), (LOAD, 0, 0, number)]
    if machine == "x86_64":  # the x32 calls have numbers of their own
        program += [(AT_LEAST, 0, 1, 0x40000000), (RETURN, 0, 0, DENY)]
    for call in DENIED.values():
        if call[column] is not None:
            program += [(EQUAL, 0, 1, call[column]), (RETURN, 0, 0, DENY)]
    ours = {"kill": os.getpid(), "tgkill": os.getpid(), "prlimit64": 0}
    for name, value in ours.items():
        program += [(EQUAL, 0, 4, CALLS[name][column]), (LOAD, 0, 0, argument), (EQUAL, 1, 0, value)]
        program += [(RETURN, 0, 0, DENY), (RETURN, 0, 0, ALLOW)]
    program += [(EQUAL, 0, 4, CALLS["clone"][column]), (LOAD, 0, 0, argument), (BITS, 1, 0, CLONE_THREAD)]
    program += [(RETURN, 0, 0, DENY), (RETURN, 0, 0, ALLOW)]
    # its flags lie in memory, out of our sight: without it, the C library falls back on clone
    program += [(EQUAL, 0, 1, CALLS["clone3"][column]), (RETURN, 0, 0, 0x00050000 | ENOSYS), (RETURN, 0, 0, ALLOW)]
    code = b"".join(struct.pack("HBBI", *line) for line in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(buffer))
    return LIBC.prctl(PR_SET_SECCOMP, 2, ctypes.c_char_p(header), 0, 0) == 0


def main(request_fd: int, report_fd: int) -> None:
    with open(request_fd, "rb") as file:
        request = json.load(file)
    missing = confine(request["timeout_s"], request["memory_bytes"])
    tests = request["tests"]
    module = types.ModuleType("__main__" if tests is None else "solution")
    sys.modules["__main__"] = sys.modules[module.__name__] = module
    sys.argv = ["solution.py"]
    space = module.__dict__
    code = compile(request["code"], "solution.py", "exec")
    with contextlib.suppress(*([] if tests is None else [SystemExit])):
        exec(code, space)
    report = {"missing": missing, "passed": [_passes(test, space) for test in tests or []], "word": request["word"]}
    os.write(report_fd, json.dumps(report).encode())


def _passes(test: str, space: dict) -> bool:
    try:
        exec(compile(test, "test.py", "exec"), space)
        return True
    except (Exception, SystemExit):
        return False


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
