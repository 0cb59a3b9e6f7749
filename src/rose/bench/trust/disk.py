"""A file system in memory whose disks can be full: as much of `pathlib.Path` as a node uses."""

from __future__ import annotations

import errno
import os


class Disk:
    def __init__(self) -> None:
        self.files: dict[str, str] = {}
        self.full: set[str] = set()
        """Folders (first parts of a name) on which nothing can be written; names can be changed."""

    def path(self, name: str) -> DiskPath:
        return DiskPath(self, name)

    def write(self, name: str, content: str) -> None:
        if name.partition("/")[0] in self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.files[name] = content


class DiskPath:
    def __init__(self, disk: Disk, name: str) -> None:
        self._disk, self._name = disk, name

    def __str__(self) -> str:
        return self._name

    @property
    def parent(self) -> DiskPath:
        return DiskPath(self._disk, self._name.rpartition("/")[0])

    @property
    def name(self) -> str:
        return self._name.rpartition("/")[2]

    def with_name(self, name: str) -> DiskPath:
        return DiskPath(self._disk, self._name.removesuffix(self.name) + name)

    def with_suffix(self, suffix: str) -> DiskPath:
        return DiskPath(self._disk, self._name.partition(".")[0] + suffix)

    def mkdir(self, *, parents: bool = False, exist_ok: bool = False) -> None:
        """Folders come with their files."""

    def chmod(self, mode: int) -> None:
        """Nobody else is here."""

    def exists(self) -> bool:
        return self._name in self._disk.files

    def read_text(self) -> str:
        try:
            return self._disk.files[self._name]
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)) from None

    def write_text(self, content: str) -> None:
        self._disk.write(self._name, content)

    def replace(self, other: DiskPath) -> None:
        self._disk.files[str(other)] = self._disk.files.pop(self._name)

    def unlink(self, *, missing_ok: bool = False) -> None:
        if self._disk.files.pop(self._name, None) is None and not missing_ok:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
