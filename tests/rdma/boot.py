"""Boot a kernel with soft-RoCE in QEMU and run the tests over RDMA verbs in it: `make test-rdma`.

The guest has this machine's files, read-only, and a network device whose RDMA is done by the kernel (rdma_rxe). README.md beside
this file says more. Needs QEMU and a few packages, which it asks for and never installs, and of Python only what comes with it.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import selectors
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
WORK = ROOT / ".kvferry" / "rdma"
KERNEL_PACKAGE = "linux-image-amd64"  # Debian's; it depends on the one that holds the kernel
# What the guest loads itself; the rest comes along as what these need. In this order.
MODULES = ("virtio_pci", "9pnet_virtio", "9p", "dummy", "ib_uverbs", "rdma_ucm", "crc32_generic", "rdma_rxe")
# Programs, and the package of Debian that has them.
PROGRAMS = {
    "qemu-system-x86_64": "qemu-system-x86",
    "busybox": "busybox-static",
    "modprobe": "kmod",
    "depmod": "kmod",
    "ip": "iproute2",
    "rdma": "iproute2",
}
LIBRARY_FOLDERS = (Path("/usr/lib/x86_64-linux-gnu"), Path("/usr/lib64"), Path("/usr/lib"))
DRIVER = "libibverbs/librxe-rdmav34.so"  # of ibverbs-providers
# Each test has a quarter of an hour: emulated, on a busy machine, opening one transport takes half a minute.
PYTEST = (
    *("-p", "tests.rdma.witness", "-p", "no:cacheprovider", "--timeout=900", "--color=no"),
    *("tests/rdma/verbs.py", "tests/transport/test_contract.py"),
)
# The wheel's libibverbs finds no drivers on Debian; and two libnl in one process are the end of it (see nixl_library).
SUBSTITUTES = {
    "libibverbs-*.so*": "libibverbs.so.1",
    "libnl-3-*.so*": "libnl-3.so.200",
    "libnl-route-3-*.so*": "libnl-route-3.so.200",
}

UP, EXIT = "kvferry-guest: up", "kvferry-guest: exit "
SPAWN_LIMIT_S = 120.0  # for the commands that prepare
KVM_BOOT_LIMIT_S = 30.0
TCG_BOOT_LIMIT_S = 300.0


class CannotRun(Exception):
    """What is missing, and how to get it."""


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process, by its id, and wait for that."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def die_with_parent() -> None:
    """In the child: the kernel kills it when this process ends, however that is."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def call(*command: str, folder: Path | None = None, stdin: bytes | None = None) -> str:
    """Standard output of a command.

    Raises:
        CannotRun: It failed, or took too long.
    """
    try:
        done = subprocess.run(command, cwd=folder, input=stdin, capture_output=True, timeout=SPAWN_LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise CannotRun(f"{shlex.join(command)} took more than {SPAWN_LIMIT_S:.0f} s") from error
    if done.returncode:
        raise CannotRun(f"{shlex.join(command)} failed: {done.stderr.decode(errors='replace').strip()[-500:]}")
    return done.stdout.decode(errors="replace")


# What has to be there


def check_machine() -> dict[Path, Path]:
    """Libraries that NIXL's wheel carries, and for each the system's that takes its place in the guest.

    Raises:
        CannotRun: Something is missing.
    """
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise CannotRun(f"the guest's kernel is for Linux on x86_64; this is {platform.system()} on {platform.machine()}")
    if any(ROOT.is_relative_to(hidden) for hidden in ("/run", "/dev", "/proc", "/sys")):
        raise CannotRun(f"{ROOT} is in a place that the guest has a file system of its own for; move the checkout")
    missing = sorted({package for program, package in PROGRAMS.items() if not which(program)})
    drivers = [folder / DRIVER for folder in LIBRARY_FOLDERS if (folder / DRIVER).exists()]
    if not drivers:
        missing.append("ibverbs-providers")
    if missing:
        names = " ".join(missing)
        raise CannotRun(f"something is missing that these packages bring: {names}. On Debian: apt-get install {names}")
    system = drivers[0].parents[1]
    substitutes = {
        path: (system / name).resolve()
        for entry in map(Path, sys.path)
        for pattern, name in SUBSTITUTES.items()
        for path in entry.glob(f"nixl_cu*.libs/{pattern}")
    }
    if not substitutes:
        raise CannotRun(f"NIXL is not installed for {sys.executable}: make setup, or pip install 'kvferry[nixl]'")
    return substitutes


def which(program: str) -> str | None:
    return shutil.which(program, path=os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin")


# The kernel


def find_kernel() -> tuple[Path, Path, str]:
    """A kernel, the folder that has its modules in ``lib/modules``, and its version; fetched when it is not there yet.

    Raises:
        CannotRun: There is none, and it cannot be fetched.
    """
    tree = WORK / "kernel"
    if not (tree / "complete").exists():
        fetch_kernel(tree)
    (image,) = (tree / "boot").glob("vmlinuz-*")
    return image, tree, image.name.removeprefix("vmlinuz-")


def fetch_kernel(tree: Path) -> None:
    """Debian's kernel package, unpacked into `tree`; nothing is installed."""
    how = f"or unpack a kernel package of Debian into {tree} (dpkg-deb -x), run depmod -b on it, and touch {tree / 'complete'}"
    if which("apt-get") is None or which("dpkg-deb") is None:
        raise CannotRun(f"the guest's kernel is taken from Debian's packages, and there is no apt-get here: use Debian, {how}")
    depends = [line.split() for line in call("apt-cache", "depends", "--important", KERNEL_PACKAGE).splitlines()]
    names = [words[-1] for words in depends if words[:1] == ["Depends:"] and words[-1].startswith("linux-image-")]
    if len(names) != 1:
        raise CannotRun(f"apt knows no package {KERNEL_PACKAGE}: apt-get update (Debian), {how}")
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir(parents=True)
    print(f"rdma: fetching {names[0]} (70 MB), once", flush=True)
    call("apt-get", "download", "-q", names[0], folder=tree)
    (package,) = tree.glob("*.deb")
    call("dpkg-deb", "-x", str(package), str(tree))
    package.unlink()
    (image,) = (tree / "boot").glob("vmlinuz-*")
    call("depmod", "-b", str(tree), image.name.removeprefix("vmlinuz-"))
    (tree / "complete").touch()


# The guest


def module_files(tree: Path, version: str) -> list[Path]:
    """`MODULES` and what they need, in the order in which they can be loaded."""
    files: dict[Path, None] = {}
    for name in MODULES:
        for line in call(which("modprobe") or "modprobe", "-d", str(tree), "-S", version, "--show-depends", name).splitlines():
            if line.startswith("insmod "):
                files[Path(line.split()[1])] = None
    return list(files)


def write_initramfs(tree: Path, version: str, environment: dict[str, str]) -> Path:
    """busybox, the modules, `guest-init` and what the guest has to know, as the kernel unpacks it."""
    root = WORK / "initramfs"
    shutil.rmtree(root, ignore_errors=True)
    for name in ("bin", "dev", "proc", "sys", "host", "modules"):
        (root / name).mkdir(parents=True)
    busybox = which("busybox")
    assert busybox is not None
    shutil.copy(busybox, root / "bin" / "busybox")
    shutil.copy(FOLDER / "guest-init", root / "init")
    (root / "init").chmod(0o755)
    modules = module_files(tree, version)
    for module in modules:
        shutil.copy(module, root / "modules" / module.name)
    (root / "modules" / "order").write_text("".join(f"{module.name}\n" for module in modules), encoding="ascii")
    lines = [f"{name}={shlex.quote(value)}\n" for name, value in environment.items()]
    (root / "guest.env").write_text("".join(lines), encoding="utf-8")
    names = "\n".join(str(path.relative_to(root)) for path in sorted(root.rglob("*"))) + "\n"
    image = WORK / "initramfs.cpio"
    with image.open("wb") as file:
        command = [busybox, "cpio", "-o", "-H", "newc"]
        done = subprocess.run(command, cwd=root, input=names.encode(), stdout=file, stderr=subprocess.PIPE, check=False)
    if done.returncode:
        raise CannotRun(f"busybox cpio failed: {done.stderr.decode(errors='replace').strip()}")
    return image


def qemu_command(accelerator: str, kernel: Path, initramfs: Path, *, num_cpus: int, memory_mb: int) -> list[str]:
    processor = {"kvm": "host", "tcg": "max"}[accelerator]
    # Emulated processors share one counter, which the kernel has to be told: without it each look at the clock is a device's.
    words = "console=ttyS0 quiet loglevel=3 panic=-1 mitigations=off" + (" tsc=reliable" if accelerator == "tcg" else "")
    return [
        "qemu-system-x86_64",
        *("-accel", "tcg,thread=multi" if accelerator == "tcg" else accelerator, "-cpu", processor),
        *("-smp", str(num_cpus), "-m", str(memory_mb)),
        *("-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-serial", "stdio"),
        *("-kernel", str(kernel), "-initrd", str(initramfs), "-append", words),
        *("-fsdev", "local,id=host,path=/,security_model=none,readonly=on,multidevs=remap"),
        *("-device", "virtio-9p-pci,fsdev=host,mount_tag=host"),
    ]


class Guest:
    """A running QEMU and what it says on its serial line."""

    def __init__(self, command: Sequence[str]) -> None:
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=die_with_parent,
        )
        self.said_all = False  # its line is closed, which it is a moment before the process can be seen to have ended
        self._heard = b""

    def lines(self, ends_at: float) -> Iterator[str]:
        """Those that no caller has had yet, until the guest is off or the time (`time.monotonic`) has come."""
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while True:
                while b"\n" in self._heard:
                    line, _, self._heard = self._heard.partition(b"\n")
                    yield line.rstrip(b"\r").decode(errors="replace")
                left_s = ends_at - time.monotonic()
                if left_s <= 0 or not selector.select(left_s):
                    return
                data = os.read(self.process.stdout.fileno(), 65536)
                if not data:
                    self.said_all = True
                    break
                self._heard += data
        if self._heard:
            rest, self._heard = self._heard, b""
            yield rest.decode(errors="replace")


def boot(command: Sequence[str], *, limit_s: float, boot_limit_s: float) -> int | None:
    """Exit status of what the guest ran; None: it did not come up within `boot_limit_s`."""
    begun_s = time.monotonic()
    guest = Guest(command)
    try:
        early = []
        for line in guest.lines(begun_s + boot_limit_s):
            if UP in line:
                break
            early.append(line)
        else:
            print("rdma: the guest did not come up; its last words:", *early[-15:], sep="\n    ", flush=True)
            return None
        print(f"rdma: the guest came up in {time.monotonic() - begun_s:.0f} s", flush=True)
        for line in guest.lines(begun_s + limit_s):
            if line.startswith(EXIT):
                return int(line.removeprefix(EXIT))
            print(line, flush=True)
        why = "ended before it was done" if guest.said_all else "took too long"
        print(f"rdma: the guest {why} ({time.monotonic() - begun_s:.0f} s; --limit-s is {limit_s:.0f})", flush=True)
        return 1
    finally:
        stop(guest.process)


def run(options: argparse.Namespace, pytest_arguments: Sequence[str]) -> int:
    """The exit status of pytest in the guest.

    Raises:
        CannotRun: The guest cannot be made, or does not come up.
    """
    substitutes = check_machine()
    kernel, tree, version = find_kernel()
    command = options.command or shlex.join([sys.executable, "-m", "pytest", *PYTEST, *pytest_arguments])
    environment = {
        "ROOT": str(ROOT),
        "SUBSTITUTES": "".join(f"{system}:{carried}\n" for carried, system in substitutes.items()),
        "COMMAND": command,
    }
    initramfs = write_initramfs(tree, version, environment)
    accelerators = ["kvm", "tcg"] if options.accel == "auto" else [options.accel]
    if options.accel == "auto" and not os.access("/dev/kvm", os.R_OK | os.W_OK):
        accelerators = ["tcg"]
    for accelerator in accelerators:
        print(f"rdma: booting {version} under QEMU ({accelerator})", flush=True)
        line = qemu_command(accelerator, kernel, initramfs, num_cpus=options.cpus, memory_mb=options.memory_mb)
        boot_limit_s = KVM_BOOT_LIMIT_S if accelerator == "kvm" else TCG_BOOT_LIMIT_S
        status = boot(line, limit_s=options.limit_s, boot_limit_s=boot_limit_s)
        if status is not None:
            return status
    raise CannotRun(f"no guest under {' or '.join(accelerators)}")


def main(arguments: Sequence[str] | None = None) -> int:
    """pytest's exit status, or 2 when there is no guest to run it in."""
    parser = argparse.ArgumentParser(prog="make test-rdma", description="Tests over RDMA verbs, in a guest with soft-RoCE.")
    parser.add_argument(
        "--accel", choices=("auto", "kvm", "tcg"), default="auto", help="auto: KVM where it works, else emulation"
    )
    parser.add_argument("--cpus", type=int, default=2, help="of the guest (default: 2)")
    parser.add_argument("--memory-mb", type=int, default=4096, help="of the guest (default: 4096)")
    parser.add_argument("--limit-s", type=float, default=3000.0, help="seconds that all of it may take (default: 3000)")
    parser.add_argument("--command", help="a shell command to run in the guest in place of the tests")
    options, pytest_arguments = parser.parse_known_args(arguments)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))  # so that the guest is ended
    try:
        return run(options, pytest_arguments)
    except CannotRun as error:
        print(f"make test-rdma: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
