"""Start a Python program that sees nothing of this machine but Python: no network, no files, no other processes.

By bubblewrap, or by namespaces of `unshare` with a root folder of their own. A program that is started neither way
(`none`) keeps its limits, which are its own business, and sees all that this user sees.
"""

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

Isolation = Literal["auto", "bubblewrap", "unshare", "none"]
NOBODY = 65534
SCRATCH_BYTES = 16 << 20  # of the working folder, in memory
PATH = "/usr/sbin:/usr/bin:/sbin:/bin"  # of what sets the isolation up; the program has no environment

_NEW_ROOT = f"""
set -e
umask 022
root=$1
shift
mount -t tmpfs -o size={SCRATCH_BYTES},nr_inodes=1024,mode=755 tmpfs "$root"
while [ "$1" != -- ]; do
  mkdir -p "$root$1"
  mount --rbind "$1" "$root$1"
  shift
done
shift
while read -r _ _ _ _ point _; do
  case $point in "$root"/*) mount -o remount,bind,ro,nosuid,nodev "$point" ;; esac
done < /proc/self/mountinfo
mkdir "$root/dev"
: > "$root/dev/null"
mount --bind /dev/null "$root/dev/null"
mkdir -m 1777 "$root/tmp"
mount -t tmpfs -o size={SCRATCH_BYTES},nr_inodes=1024,mode=1777 tmpfs "$root/tmp"
mount -o remount,bind,ro "$root"
exec env -i "$(command -v chroot)" "$root" "$@"
"""

_ROOT = "/root-of-program"  # after chroot, which unshare uses too, nobody opens a user namespace

Launch = Callable[[str, Sequence[str]], list[str]]
"""From an empty folder and a command: the command that runs it in isolation, where `/tmp` is the working folder."""


def bubblewrap(_: str, command: Sequence[str]) -> list[str]:
    """Launch by bubblewrap."""
    program = [_installed("bwrap"), "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    program += ["--unshare-cgroup-try", "--die-with-parent", "--clearenv", "--cap-drop", "ALL"]
    program += ["--cap-add", "CAP_SYS_CHROOT"]
    if os.geteuid() == 0:  # what the program needs to become another user
        program += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    for folder in readable_folders():
        for parent in reversed(Path(_ROOT + folder).parents):  # that any user may pass through
            program += ["--perms", "0755", "--dir", str(parent)]
        program += ["--ro-bind", folder, folder, "--ro-bind", folder, _ROOT + folder]
    program += ["--perms", "0755", "--dir", f"{_ROOT}/dev", "--dev-bind", "/dev/null", f"{_ROOT}/dev/null"]
    program += ["--perms", "1777", "--size", str(SCRATCH_BYTES), "--tmpfs", f"{_ROOT}/tmp", "--remount-ro", "/"]
    return [*program, "--", _installed("chroot"), _ROOT, *command]


def unshare(folder: str, command: Sequence[str]) -> list[str]:
    """Launch in namespaces of its own, with `folder` as the place of its root."""
    program = [_installed("unshare"), "--pid", "--net", "--ipc", "--uts", "--mount", "--kill-child"]
    if os.geteuid() != 0:
        program.append("--map-root-user")
    return [*program, "--", "/bin/sh", "-c", _NEW_ROOT, "sh", folder, *readable_folders(), "--", *command]


LAUNCHES: dict[str, Launch] = {"bubblewrap": bubblewrap, "unshare": unshare}


def readable_folders() -> list[str]:
    """List the folders that Python runs from: its own and the system's libraries."""
    folders = [Path(name) for name in ("/usr", "/lib", "/lib64", sys.base_prefix, sys.base_exec_prefix)]
    found = sorted({folder for folder in folders if folder.is_dir()})
    return [str(folder) for folder in found if not any(parent in found for parent in folder.parents)]


def _installed(program: str) -> str:
    found = shutil.which(program) or shutil.which(program, path=PATH)
    if found is None:
        raise FileNotFoundError(f"{program} is not installed")
    return found
