"""Known causes: from what a failing rank said, or how it ended, to what to do."""

from __future__ import annotations

import re
import signal

from .status import signal_of

# In the order in which they are tried: the particular before the general.
CAUSES = (
    (
        r"CUDA out of memory|HIP out of memory|torch\.(cuda\.)?OutOfMemoryError",
        "the GPU's memory is full: lower training.micro_batch_size, turn on activation checkpointing, raise "
        "zero.stage. If torch reports much memory as reserved but unallocated, launch.environment="
        "{PYTORCH_ALLOC_CONF: 'expandable_segments:True'}",
    ),
    (
        r"DefaultCPUAllocator|Cannot allocate memory|MemoryError",
        "the host's memory is full: fewer ranks or data workers on this host, or a smaller model",
    ),
    (
        r"/dev/shm(?!/deepy-)|unable to (open|mmap|write to) shared memory|shared memory \(shm\)|Bus error",
        "/dev/shm is full or too small: docker run --shm-size=8g, or a larger tmpfs on /dev/shm",
    ),
    (
        r"Host key verification failed",
        "ssh does not know the host's key: connect once by hand (`ssh HOST true`) or add it to known_hosts",
    ),
    (
        r"Permission denied \((publickey|.*password)",
        "ssh has no key that the host accepts: ssh-copy-id HOST, or name the key in ~/.ssh/config",
    ),
    (
        r"Could not resolve hostname|Name or service not known|Temporary failure in name resolution",
        "a host's name means nothing here: check the hostfile and DNS or /etc/hosts",
    ),
    (
        r"Address already in use|EADDRINUSE",
        "the port is taken, by another run or a rest of one: without launch.master_port a free one is chosen",
    ),
    (
        r"^checkpoint\.levels: .*\[Errno",
        "the folder of a level of checkpoint.levels cannot be made on that host: fix the disk, or choose another path",
    ),
    (
        r"No space left on device|Errno 28",
        "a disk is full: checkpoints, logs or the temporary folder. See `df -h` on that host",
    ),
    (r"Disk quota exceeded|Errno 122", "the disk quota is used up"),
    (
        r"Read-only file system|Errno 30|Errno 13\] Permission denied",
        "a folder cannot be written to: choose another run.dir (checkpoints and logs are below it), or fix its rights",
    ),
    (r"Too many open files|Errno 24", "too many open files: raise `ulimit -n` on that host"),
    (
        r"no kernel image is available|CUDA driver version is insufficient|HIP error: invalid device function",
        "this torch build does not fit the GPU or its driver: `deepy doctor` shows both",
    ),
    (
        r"CUDA error: device-side assert",
        "an index was out of range on the GPU, often a token beyond the vocabulary. See CUDA_LAUNCH_BLOCKING=1",
    ),
    (
        r"CUDA error: (uncorrectable ECC|unspecified launch failure|an illegal memory access)|Xid",
        "the GPU or its memory failed: search for Xid in `dmesg` on that host and exclude the host (launch.exclude)",
    ),
    (
        r"invalid device ordinal|No CUDA GPUs are available|No HIP GPUs are available",
        "a rank has no GPU: more ranks than visible GPUs on that host (launch.ranks, slots=, CUDA_VISIBLE_DEVICES)",
    ),
    (
        r"Watchdog caught collective operation timeout|Timed out waiting \d+ms|"
        r"timed out.*(all_?reduce|broadcast|barrier|send|recv)|"
        r"wait timeout after|Socket Timeout",
        "a collective waited for a rank that did not come. Find the rank that hangs or has failed (its log is among "
        "the others), or a network that is cut. launch.timeout sets how long to wait",
    ),
    (
        r"ncclSystemError|ncclInternalError|ncclRemoteError|NCCL error|RCCL error",
        "NCCL failed: run again with NCCL_DEBUG=INFO. A wrong network interface (launch.interface) and small "
        "locked-memory limits (`ulimit -l`) are the usual causes",
    ),
    (
        r"(Connection (refused|reset|closed)|Broken pipe).*|connectFullMesh|Connection closed by peer",
        "a peer went away or cannot be reached: if no rank failed earlier, check launch.interface and firewalls",
    ),
    (
        r"ModuleNotFoundError: No module named '([^']+)'",
        "a Python package is missing on that host: pip install the package, or deepy with the extra that has it",
    ),
)
SIGNALS = {
    signal.SIGKILL: "killed from outside: mostly by the kernel for want of memory (see `dmesg`), or the scheduler",
    signal.SIGSEGV: "crashed in compiled code, mostly libraries that do not fit together. See PYTHONFAULTHANDLER=1",
    signal.SIGBUS: "/dev/shm ran out of room (docker --shm-size), or a memory-mapped data file was cut short",
    signal.SIGABRT: "a library gave up (abort): its message is in the rank's log",
    signal.SIGILL: "an instruction that this CPU does not have: a library was built for another machine",
    signal.SIGFPE: "an arithmetic fault in compiled code",
    signal.SIGTERM: "somebody asked it to stop: the scheduler, an operator, or a limit of the machine",
    signal.SIGXCPU: "the CPU time limit (`ulimit -t`) was reached",
    signal.SIGXFSZ: "the file size limit (`ulimit -f`) was reached",
    signal.SIGHUP: "the terminal or the connection it hung on was closed",
    signal.SIGPIPE: "it wrote to something that no process reads any more",
}


def hint_for(text: str, status: int) -> str | None:
    """The probable cause and the advice, or None where nothing is known."""
    for pattern, cause in CAUSES:
        if re.search(pattern, text, re.MULTILINE):
            return cause
    number = signal_of(status)
    return None if number is None else SIGNALS.get(number)
