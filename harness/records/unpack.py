"""Reading results that someone else shares: an archive (`harness.records.archive`) or a folder, by the same words.

    with opened(Path("results.zip")) as folder:
        ...    # as in a results folder

Nothing of an archive is trusted: neither names, links and sizes, nor that it is what its manifest says.
"""

from __future__ import annotations

import json
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from stat import S_ISLNK
from typing import Any

from harness.errors import UserError
from harness.records.archive import MANIFEST, RECORDS, SCHEMA, digest, inputs_of, origin
from harness.records.form import ODD
from harness.records.record import read_record

MAX_BYTES = 2 * 2**30
"""Of all members unpacked: no results of ours come near it."""
MAX_MANIFEST_BYTES = 2**26
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
DAMAGE = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, RuntimeError, UnicodeDecodeError)
"""What zipfile raises of a file that is no zip archive, or not all of one; RuntimeError of an encrypted one."""


@contextmanager
def opened(source: Path) -> Iterator[Path]:
    """A results folder to read: `source` itself, or what the archive `source` holds, unpacked for as long as it lasts.

    Raises:
        UserError: nothing is there, or an archive that `pack` did not write so; and of what is read in the block,
            with the archive's name in place of the folder's.
    """
    if source.is_dir():
        yield source
        return
    if not source.is_file():
        raise UserError(f"{source}: no such results folder or archive")
    with tempfile.TemporaryDirectory(prefix="results-") as name:
        folder = Path(name)
        try:
            _unpack(source, folder)
            yield folder
        except UserError as error:
            raise UserError(str(error).replace(str(folder), str(source))) from error
        except ODD as error:
            raise UserError(f"{source}: holds what no run writes ({error!r})") from error


def _unpack(source: Path, folder: Path) -> None:
    """Check every member and write it below `folder`."""
    try:
        with zipfile.ZipFile(source) as archive:
            infos = _infos(source, archive)
            manifest = _manifest(source, archive, infos)
            records = []
            for name, expected in manifest["members"].items():
                data = _read(source, archive, name, expected["size"])
                if digest(data) != expected:
                    raise UserError(f"{source}: {name} is not what the manifest says")
                path = folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
                if path.match(RECORDS):
                    records.append(origin(read_record(path)))
    except OSError as error:
        raise UserError(f"{source}: cannot be unpacked ({error.strerror or error})") from error
    except DAMAGE as error:
        raise UserError(f"{source}: not an archive of results, or damaged ({error})") from error
    if inputs_of(records) != manifest["inputs"]:
        raise UserError(f"{source}: the inputs in {MANIFEST} are not those of the records")


def _infos(source: Path, archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """The members by name; UserError for one that must not be unpacked, or stands there twice."""
    infos: dict[str, zipfile.ZipInfo] = {}
    for info in archive.infolist():
        name = info.filename
        if not _is_safe(name) or name != info.orig_filename:
            raise UserError(f"{source}: unsafe name of a member, {info.orig_filename!r}")
        if info.compress_type not in METHODS:
            raise UserError(f"{source}: {name} is compressed in another way than by deflate")
        if S_ISLNK(info.external_attr >> 16):
            raise UserError(f"{source}: {name} is a link; an archive of results has plain files only")
        if name in infos:
            raise UserError(f"{source}: {name} is in it twice")
        infos[name] = info
    return infos


def _is_safe(name: str) -> bool:
    """Whether it is a relative path that stays below its folder, and can be shown."""
    return name.isprintable() and "\\" not in name and not {"", ".", ".."} & {*name.split("/")}


def _manifest(source: Path, archive: zipfile.ZipFile, infos: Mapping[str, zipfile.ZipInfo]) -> dict[str, Any]:
    """The manifest, whose members are those of the archive and no larger than any results are."""
    if MANIFEST not in infos:
        raise UserError(f"{source}: not an archive of results, it has no {MANIFEST}")
    try:
        manifest = json.loads(_read(source, archive, MANIFEST, MAX_MANIFEST_BYTES))
        schema, members = manifest["schema"], manifest["members"]
        sizes = [member["size"] for member in members.values()]
        well_formed = isinstance(manifest["inputs"], dict) and all(type(size) is int and size >= 0 for size in sizes)
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{source}: {MANIFEST} is damaged") from error
    if schema != SCHEMA:
        raise UserError(f"{source}: of schema {schema!r}; this version reads {SCHEMA}")
    if not well_formed:
        raise UserError(f"{source}: {MANIFEST} is damaged")
    for name in sorted({*members, MANIFEST} ^ infos.keys()):
        raise UserError(f"{source}: {name} is {'missing' if name in members else 'not in the manifest'}")
    if sum(sizes) > MAX_BYTES:
        raise UserError(f"{source}: {sum(sizes):,} bytes unpacked, more than the {MAX_BYTES:,} that are read")
    return dict(manifest)


def _read(source: Path, archive: zipfile.ZipFile, name: str, size: int) -> bytes:
    """A member of at most `size` bytes; no more than one further byte is unpacked, whatever its header says."""
    try:
        with archive.open(name) as stream:
            data = stream.read(size + 1)
    except DAMAGE as error:
        raise UserError(f"{source}: {name} is damaged ({error})") from error
    if len(data) > size:
        raise UserError(f"{source}: {name} is larger than the {size:,} bytes that are allowed")
    return data
