"""Files that are never half written, and text from Windows."""

import codecs
import contextlib
import os
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from judge.commands import UserError


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Opens a binary file for writing. It is written to a temporary file, fsynced, and then
    renamed to `path`, so `path` is never incomplete. Raises OSError."""
    # The temporary file is in the same folder because a rename is atomic only within a file
    # system. Its name doesn't match *.bin, so no reader takes it for a shard. The name is chosen
    # here and not by tempfile, so that an interrupt can't come between creating and naming it.
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "xb") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except BaseException as e:
        with contextlib.suppress(OSError):
            temporary.unlink()
        # a full disk names no file, and other errors the temporary one
        if isinstance(e, OSError) and e.errno:
            raise OSError(e.errno, e.strerror, str(path)) from None
        raise


def write_file(name: str | Path, data: bytes) -> None:
    """Writes a file with atomic_write. Raises OSError.

    If the name is a symbolic link, the file that it points to is replaced. A device or a pipe, such as
    /dev/stdout, can't be replaced, so this writes into it."""
    if os.path.exists(name) and not os.path.isfile(name):
        with open(name, "wb") as f:
            f.write(data)
        return
    with atomic_write(Path(name).resolve()) as f:
        f.write(data)


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Gives an empty folder to write into, which gets this name when all is written. Raises UserError if
    something has it already."""
    if folder.exists():
        raise UserError(f"{folder} exists already; choose another name")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".new-") as temporary:
        made = Path(temporary, folder.name)
        made.mkdir()
        yield made
        os.rename(made, folder)


def without_windows(text: bytes) -> bytes:
    """Text without what Windows adds: a byte-order mark, and its line ends if all are of this kind.
    Otherwise they are those of a file that the text quotes. PowerShell writes UTF-16."""
    if text.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        text = text.decode("utf-16", "replace").encode()
    text = text.removeprefix(codecs.BOM_UTF8)
    if text.count(b"\n") == text.count(b"\r\n"):
        text = text.replace(b"\r\n", b"\n")
    return text
