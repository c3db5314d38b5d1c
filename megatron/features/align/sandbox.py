"""Run a program that a model wrote: no network, no other process, no file outside its folder, limited time and memory.

Everything is done by the process on itself before the program begins, without privileges. Limits of resources bound
time, memory and files. Landlock denies writes outside the folder, and folders and links in it: a deep tree could not
be removed. A filter of system calls (seccomp) denies sockets, new processes, signals to other processes, their memory
and their priority. Files of the machine can be read, as far as the user may.

This file is also the script that does it: `python -I sandbox.py FOLDER SECONDS MEMORY`, in which PROGRAM runs."""

import ctypes
import os
import platform
import resource
import signal
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAM = "program.py"
REFUSED = 97  # exit status: the limits cannot be set here
LARGEST_FILE, FILES = 16 << 20, 64  # bytes of a file, and files open at one time

# Numbers of system calls that are denied: sockets, new processes, signals to others, their memory, limits and priority.
# Landlock permits changes of owners, modes, times and attributes of files. Shared memory, queues and semaphores of the
# machine, which outlive a program. io_uring, namespaces and mounts.
_DENIED = {
    "x86_64": (41, 53, 57, 58, 62, 200, 234, 101, 310, 311, 302, 141, 203, 308, 272, 321, 323, 425, 424, 438, 250, 165)
    + (161, 109, 112, 90, 91, 92, 93, 94, 260, 268, 452, 188, 189, 190, 197, 198, 199, 280, 235, 132, 261, 29, 30, 31)
    + (71, 66, 241, 129, 297, 142, 144, 314, 251, 64, 65, 68, 69, 70, 220, 240, 463, 466, 469),
    "aarch64": (198, 199, 129, 130, 131, 117, 270, 271, 261, 140, 122, 268, 97, 280, 282, 425, 424, 438, 219, 40, 51)
    + (154, 157, 52, 53, 54, 55, 452, 5, 6, 7, 14, 15, 16, 88, 194, 195, 196, 187, 191, 181)
    + (138, 240, 118, 119, 274, 30, 180, 186, 188, 189, 190, 192, 193, 463, 466, 469),
}
# prctl that no longer ends the program with its parent. fcntl that has a pipe send signals to another process.
_DENIED_ARGUMENTS = {
    "x86_64": ((157, 16, (1,)), (72, 24, (8, 15))),
    "aarch64": ((167, 16, (1,)), (25, 24, (8, 15))),
}  # number of the call, place of the argument, its values
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435
_MACHINE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_KILL, _ALLOW, _ERROR = 0x80000000, 0x7FFF0000, 0x00050000
_PERMISSION, _MISSING = 1, 38  # EPERM, ENOSYS
_THREAD = 0x10000  # CLONE_THREAD
_PARENT_ENDS, _NO_NEW_PRIVILEGES, _SECCOMP, _FILTER = 1, 38, 22, 2  # of prctl
_RULESET, _ADD_RULE, _RESTRICT = 444, 445, 446  # Landlock
_WRITES = 0x5FF2  # its rights to write, remove, make and truncate files, of version 3 (Linux 6.2)
_GRANTED = 0x4122  # of these, in the folder: to write, remove, make and truncate plain files
_CAPABILITIES = 0x20080522  # version of the header of capset
_PATH_BENEATH = 1


class SandboxError(Exception):
    """This machine cannot limit a program."""


def run(program: str, seconds: float, memory: int) -> tuple[bool, str]:
    """Run a program. Returns whether it ended with status 0, and the end of its output.

    Args:
        memory: bytes of its address space.

    Raises:
        SandboxError: the machine has no way to limit it. Nothing was run.
    """
    with tempfile.TemporaryDirectory(prefix="program-") as folder:
        (Path(folder) / PROGRAM).write_text(program, encoding="utf-8", errors="surrogatepass")
        command = [sys.executable, "-I", __file__, folder, str(max(1, round(seconds))), str(memory)]
        with (Path(folder) / ".output").open("w+b") as output:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "PYTHONDONTWRITEBYTECODE": "1"},
            )
            try:
                status = child.wait(seconds)
            except subprocess.TimeoutExpired:
                status = -9
            finally:
                child.kill()
                child.wait()
            output.seek(max(0, output.seek(0, os.SEEK_END) - 2000))
            text = output.read().decode(errors="replace")
    if status == REFUSED and text.startswith("sandbox: "):
        raise SandboxError(text.removeprefix("sandbox: ").strip())
    return status == 0, text


def _filter(machine: str) -> bytes:
    """The filter of system calls, in the kernel's instructions (struct sock_filter)."""
    denied = _DENIED[machine]
    checks = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, _MACHINE[machine]), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    checks += [(_AT_LEAST, 0, 1, 0x40000000), (_RETURN, 0, 0, _KILL)]  # x86-64's second table of calls
    for number in denied:
        checks += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERROR | _PERMISSION)]
    for number, place, values in _DENIED_ARGUMENTS[machine]:
        checks += [(_EQUAL, 0, 2 + 2 * len(values), number), (_LOAD, 0, 0, place)]
        for value in values:
            checks += [(_EQUAL, 0, 1, value), (_RETURN, 0, 0, _ERROR | _PERMISSION)]
        checks += [(_RETURN, 0, 0, _ALLOW)]
    checks += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ERROR | _MISSING)]  # the C library then uses clone
    checks += [(_EQUAL, 0, 3, _CLONE[machine]), (_LOAD, 0, 0, 16), (_ANY_BIT, 1, 0, _THREAD)]
    checks += [(_RETURN, 0, 0, _ERROR | _PERMISSION), (_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("HBBI", *check) for check in checks)


def _restrict(folder: str) -> None:
    """Deny writes outside the folder, and the calls above, for this process from now on.

    Raises:
        OSError, KeyError: the kernel or the machine does not support it.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def call(function: str, *arguments: object) -> int:
        found = getattr(libc, function)(*arguments)
        if found < 0:
            raise OSError(ctypes.get_errno(), f"{function}: {os.strerror(ctypes.get_errno())}")
        return found

    machine = platform.machine()
    program = _filter(machine)
    call("prctl", _PARENT_ENDS, signal.SIGKILL, 0, 0, 0)
    call("prctl", _NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    rights = struct.pack("Q", _WRITES)
    rules = call("syscall", _RULESET, rights, ctypes.c_size_t(len(rights)), 0)
    home = os.open(folder, os.O_PATH | os.O_CLOEXEC)
    call("syscall", _ADD_RULE, rules, _PATH_BENEATH, struct.pack("=Qi", _GRANTED, home), 0)
    call("syscall", _RESTRICT, rules, 0)
    call("capset", struct.pack("Ii", _CAPABILITIES, 0), bytes(24))  # root keeps no privilege
    instructions = ctypes.create_string_buffer(program, len(program))
    whole = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(instructions))
    call("prctl", _SECCOMP, _FILTER, whole, 0, 0)


def main(folder: str, seconds: str, memory: str) -> None:
    """Limit this process, and run the program in it."""
    limits = {
        resource.RLIMIT_CPU: int(seconds) + 1,
        resource.RLIMIT_AS: int(memory),
        resource.RLIMIT_FSIZE: LARGEST_FILE,
        resource.RLIMIT_NOFILE: FILES,
        resource.RLIMIT_CORE: 0,
    }
    try:
        for limit, value in limits.items():
            hard = resource.getrlimit(limit)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(limit, (value, value))
        _restrict(folder)
    except (OSError, KeyError, ValueError) as error:
        print(f"sandbox: this machine cannot limit programs: {error}", flush=True)
        os._exit(REFUSED)
    path = os.path.join(folder, PROGRAM)
    code = Path(path).read_text(encoding="utf-8", errors="surrogatepass")
    os.unlink(path)  # it has the tests
    exec(compile(code, path, "exec"), {"__name__": "__main__", "__file__": path})


if __name__ == "__main__":
    main(*sys.argv[1:])
