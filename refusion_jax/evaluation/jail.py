"""The inner part of the sandbox: a script that isolates itself and then executes the program.

`sandbox.run` starts it with a bare interpreter, a JSON object on stdin and an empty environment. It uses the standard
library only and imports none of our modules. If the isolation fails, it reports that without running the program.

    this process     waits, and kills the others on timeout
      process 1      judges; in its own PID namespace: when it ends, the kernel kills all processes in it
        process 2    without privileges and under limits, in a root directory with a Python and an empty directory

The program has no descriptor and no secret with which it could claim to have passed. Process 2 stops itself twice by
the same calls: before the program begins, and after it has reached its end. Process 1 reads in /proc where it stopped,
and only exactly the same place counts: the same system call with the same arguments, stack pointer and instruction. A
program that stops or exits by itself is somewhere else and has failed.

Some things cannot be seen from outside, as the program and its checks share an interpreter: cheating the checks
themselves (by an object that equals everything, or a trace function that skips lines), or bringing the stack pointer to
exactly the same place, by native code or carefully nested calls.
"""

import contextlib
import ctypes
import errno
import json
import os
import platform
import resource
import select
import signal
import struct
import sys

_NOBODY = 65534  # without namespaces; in them each program has a user of its own, see `Limits.processes`
_HOME = "/sandbox"  # working directory of the program
# `map` and the others are C code, so that both stops come from the same place. As HumanEval executes programs, code
# under `if __name__ == "__main__"` is not run.
_RUN = """
import functools, operator, runpy, signal
stop = functools.partial(signal.raise_signal, signal.SIGSTOP)
list(map(operator.call, (stop, functools.partial(runpy.run_path, "program.py", run_name="program"), stop)))
"""

# <linux/sched.h>, <linux/mount.h>, <linux/prctl.h>
_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = (
    *(0x00020000, 0x04000000, 0x08000000),
    *(0x10000000, 0x20000000, 0x40000000),
)
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
_MNT_DETACH, _AT_RECURSIVE, _AT_FDCWD, _ATTR_RDONLY, _ATTR_NOSUID = 2, 0x8000, -100, 1, 2
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_KEYCTL = {"x86_64": 250, "aarch64": 219}
_JOIN_SESSION_KEYRING = 1  # <linux/keyctl.h>
_CAPABILITIES_V3 = 0x20080522
_MOUNT_SETATTR = 442  # on every architecture
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

# System calls (<asm/unistd.h>) that no answer to a problem needs. Some allocate memory that no limit covers, some reach
# other processes or the user's keys, some hand work to the kernel that it does under other rules.
_FORBIDDEN = {
    "x86_64": {
        "memory": (29, 64, 68, 240, 319, 447),  # shmget, semget, msgget, mq_open, memfd_create, memfd_secret
        "processes": (101, 310, 311, 434, 438),  # ptrace, process_vm_readv, process_vm_writev, pidfd_open, pidfd_getfd
        "keys": (248, 249, 250),  # add_key, request_key, keyctl
        "kernel": (272, 298, 321, 323, 425, 426, 427),  # unshare, perf_event_open, bpf, userfaultfd, io_uring_*
    },
    "aarch64": {
        "memory": (194, 190, 186, 180, 279, 447),
        "processes": (117, 270, 271, 434, 438),
        "keys": (217, 218, 219),
        "kernel": (97, 241, 280, 282, 425, 426, 427),
    },
}
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435  # on every architecture; hidden, as filters cannot see its flags: the C library then uses clone
_SOCKET = {"x86_64": 41, "aarch64": 198}
_FAMILIES = (1, 2, 10)  # of sockets: Unix and IP, which lead nowhere, as the network namespace is empty
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # <linux/audit.h>
_X32 = 0x40000000  # in the numbers of x86_64's second table of system calls
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
_LOAD, _EQUAL, _AT_LEAST, _ANY, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # <linux/bpf_common.h>
_ALLOW, _ERROR, _KILL = 0x7FFF0000, 0x00050000, 0x80000000  # <linux/seccomp.h>
_DENY, _ABSENT = _ERROR | errno.EPERM, _ERROR | errno.ENOSYS
_NUMBER, _ARCH, _ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: object) -> None:
    """Calls a function of the C library; OSError if it returns -1."""
    if getattr(_libc, name)(*arguments) == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    texts = (text if text is None else text.encode() for text in (source, target, kind))
    _call("mount", *texts, ctypes.c_ulong(flags), options and options.encode())


def enter_namespaces() -> None:
    """Enters new namespaces for processes, mounts, network, IPC and host name; the network has no device at all.

    Users other than root need a user namespace for this.
    """
    user, group = os.getuid(), os.getgid()
    namespaces = _NEWNS | _NEWPID | _NEWNET | _NEWIPC | _NEWUTS
    _call("unshare", namespaces if user == 0 else namespaces | _NEWUSER)
    if user != 0:
        for file, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{file}", "w") as out:
                out.write(text)


def build_root(read_only: list[str], disk: int) -> None:
    """Changes to a root directory in memory, of `disk` bytes, that contains the `read_only` directories and files."""
    new = os.getcwd()
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    _mount("tmpfs", new, "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={disk},nr_inodes=10000,mode=755")
    for path in read_only:
        inside = new + path
        os.makedirs(inside if os.path.isdir(path) else os.path.dirname(inside), exist_ok=True)
        if not os.path.isdir(path):
            open(inside, "w").close()
        _mount(path, inside, None, _MS_BIND | _MS_REC)
        attributes = (ctypes.c_uint64 * 4)(_ATTR_RDONLY | _ATTR_NOSUID, 0, 0, 0)
        _call("syscall", _MOUNT_SETATTR, _AT_FDCWD, inside.encode(), _AT_RECURSIVE, attributes, 32)
    for link in ("/bin", "/lib", "/lib64"):  # into /usr on most systems
        if os.path.islink(link):
            os.symlink(os.readlink(link), new + link)
    os.mkdir(new + _HOME)
    if platform.machine() not in _PIVOT_ROOT:
        raise OSError(f"not tried on {platform.machine()}")
    os.chdir(new)
    _call("syscall", _PIVOT_ROOT[platform.machine()], b".", b".")  # the old root is now mounted over the new one
    _call("umount2", b".", _MNT_DETACH)
    os.chdir(_HOME)


def drop_root(job: dict) -> None:
    """Changes from root to a user without privileges, as the limit on processes does not apply to root."""
    if os.getuid() == 0:
        user = job["user"] if job["isolated"] else _NOBODY
        os.chown(".", user, _NOBODY)
        os.setgroups([])
        os.setgid(_NOBODY)
        os.setuid(user)


def hide() -> None:
    """Hides the session keyring and the open files of its ancestors from the program.

    Other processes of the same user cannot trace a process that is not dumpable, or take its descriptors. Its children
    are not dumpable either, until they execute the program.
    """
    with contextlib.suppress(OSError):  # a kernel or container without keys gives the program none either
        _call("syscall", _KEYCTL.get(platform.machine(), -1), _JOIN_SESSION_KEYRING, None)
    _call("prctl", _PR_SET_DUMPABLE, 0, 0, 0, 0)


def drop_capabilities() -> None:
    """Drops the capabilities that a new user namespace grants, and keeps child processes from gaining any."""
    _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    header, none = (ctypes.c_uint32 * 2)(_CAPABILITIES_V3, 0), (ctypes.c_uint32 * 6)()
    _call("capset", header, none)


def forbid_system_calls() -> None:
    """Makes the kernel refuse `_FORBIDDEN` and other socket families, with EPERM, and kill callers of another ABI."""
    machine = platform.machine()
    numbers = [number for group in _FORBIDDEN[machine].values() for number in group]
    filters = [(_LOAD, 0, 0, _ARCH), (_EQUAL, 1, 0, _AUDIT_ARCH[machine]), (_RETURN, 0, 0, _KILL)]
    filters += [(_LOAD, 0, 0, _NUMBER), (_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _DENY)]
    for number in numbers:
        filters += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _DENY)]
    # In its own user namespace a program would be root, and could mount memory that no limit covers.
    filters += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ABSENT)]
    filters += [(_EQUAL, 0, 4, _CLONE[machine]), (_LOAD, 0, 0, _ARGUMENT), (_ANY, 0, 1, _NEWUSER)]
    filters += [(_RETURN, 0, 0, _DENY), (_RETURN, 0, 0, _ALLOW)]
    filters += [(_EQUAL, 1, 0, _SOCKET[machine]), (_RETURN, 0, 0, _ALLOW), (_LOAD, 0, 0, _ARGUMENT)]
    for family in _FAMILIES:
        filters += [(_EQUAL, 0, 1, family), (_RETURN, 0, 0, _ALLOW)]
    filters += [(_RETURN, 0, 0, _DENY)]
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in filters)
    code = ctypes.create_string_buffer(code)
    program = struct.pack("HP", len(filters), ctypes.addressof(code))
    _call("prctl", _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, program, 0, 0)


def set_limits(job: dict) -> None:
    """Sets the resource limits of each process, and the total number of processes."""
    for what, most in (
        (resource.RLIMIT_CPU, int(job["seconds"]) + 1),
        (resource.RLIMIT_AS, job["memory"]),
        (resource.RLIMIT_FSIZE, job["disk"]),
        (resource.RLIMIT_NPROC, job["processes"]),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (most, most))


def become(job: dict) -> None:
    """Executes the program in place of this process, with none of its descriptors except stderr."""
    with open("program.py", "w") as file:
        file.write(job["program"])
    nothing = os.open("/dev/null", os.O_RDWR)
    for number in (0, 1):
        os.dup2(nothing, number)
    set_limits(job)
    if job["isolated"]:
        forbid_system_calls()
    os.execve(job["python"], [job["python"], "-I", "-S", "-B", "-c", _RUN], {})


def judge(job: dict, program: int, directory: int) -> dict:
    """Waits for the program, whose directory in /proc is open; returns its exit code, and whether it passed."""
    begun = None
    while True:
        ended, status = os.waitpid(-1, os.WUNTRACED)
        if ended != program:
            continue  # an orphan
        if not os.WIFSTOPPED(status):
            code = os.waitstatus_to_exitcode(status)
            return {"code": code if code >= 0 else 128 - code, "passed": False}
        place = _place(directory, needed=job["isolated"])
        if begun is not None:
            return {"code": 128 + os.WSTOPSIG(status), "passed": place == begun}
        begun = place
        os.kill(program, signal.SIGCONT)


def _place(directory: int, needed: bool) -> list[bytes]:
    """Where a process is stopped: system call, three arguments, stack and instruction pointer; empty if not known."""
    try:
        file = os.open("syscall", os.O_RDONLY, dir_fd=directory)
    except OSError:
        if needed:
            raise
        return []
    with open(file, "rb") as out:
        fields = out.read().split()  # the other argument registers hold old values
    return fields[:4] + fields[-2:]


def be_first(job: dict, tell: int, log: int) -> None:
    """Process 1: builds the root, starts the program, and reports its outcome in a line of JSON."""
    try:
        os.setpgid(0, 0)
        proc = os.open("/proc", os.O_RDONLY)  # the outer one; there is none in the root
        names, name = os.pipe()
        if job["isolated"]:
            build_root(job["read_only"], job["disk"])
        drop_root(job)
        drop_capabilities()
        _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.dup2(log, 2)
        program = os.fork()
        if program == 0:
            os.write(name, os.readlink("self", dir_fd=proc).encode())
            become(job)
        told = judge(job, program, os.open(os.read(names, 20), os.O_RDONLY, dir_fd=proc))
    except OSError as error:
        told = {"refused": str(error.strerror or error)}
    os.write(tell, json.dumps(told).encode() + b"\n")
    os.killpg(0, signal.SIGKILL)  # without namespaces, processes of the program that still run
    os._exit(0)


def main() -> None:
    """Reads the job from stdin and prints its outcome as a JSON object."""
    job = json.loads(sys.stdin.read())
    told, tell = os.pipe()
    log = os.open("stderr", os.O_RDWR | os.O_CREAT)
    try:
        if job["isolated"]:
            enter_namespaces()
        hide()
    except OSError as error:
        print(json.dumps({"refused": error.strerror or str(error)}))
        return
    first = os.fork()
    if first == 0:
        be_first(job, tell, log)
    os.close(tell)
    in_time = select.select([told], [], [], job["seconds"])[0]
    lines = os.read(told, 10_000).splitlines() if in_time else []
    with contextlib.suppress(ProcessLookupError):
        os.killpg(first, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])
    print(lines[0].decode() if lines else json.dumps({"code": code if in_time else None, "passed": False}))


if __name__ == "__main__":
    main()
