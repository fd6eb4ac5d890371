"""Pack golden cases into small tracked files, and unpack them.

    python scripts/pack_golden.py pack SOURCE tests/golden/model     # maintainer, once per change
    python scripts/pack_golden.py unpack OUT [CASE...]               # anyone; default: all cases

A case is a folder of files. It becomes `CASE.tar.xz.00`, `.01`, ... of at most 2,000,000 bytes
(weights are random, so xz saves little); joined they are an ordinary tar.xz. `SHA256SUMS` lists
every unpacked file; unpacking verifies it. Packing is deterministic. The test suite unpacks through
the same functions (tests/conftest.py).
"""

from __future__ import annotations

import hashlib
import io
import lzma
import os
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

PART_BYTES = 2_000_000
SUMS = "SHA256SUMS"
GOLDEN = Path(__file__).resolve().parents[1] / "tests" / "golden" / "model"


def cases(packed: Path = GOLDEN) -> list[str]:
    """Names of the packed cases."""
    return sorted(path.name.removesuffix(".tar.xz.00") for path in packed.glob("*.tar.xz.00"))


def pack(source: Path, packed: Path) -> None:
    """Replace the content of `packed` by the cases (sub-folders) of `source`."""
    packed.mkdir(parents=True, exist_ok=True)
    for old in packed.glob("*.tar.xz.*"):
        old.unlink()
    sums = []
    for case in sorted(path for path in source.iterdir() if path.is_dir()):
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            for path in sorted(case.iterdir()):
                content = path.read_bytes()
                entry = tarfile.TarInfo(f"{case.name}/{path.name}")
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
                sums.append(f"{hashlib.sha256(content).hexdigest()}  {entry.name}\n")
        data = lzma.compress(archive.getvalue(), preset=9)
        for part, start in enumerate(range(0, len(data), PART_BYTES)):
            target = packed / f"{case.name}.tar.xz.{part:02d}"
            target.write_bytes(data[start : start + PART_BYTES])
    (packed / SUMS).write_text("".join(sums), encoding="utf-8")


def unpack(case: str, out: Path, packed: Path = GOLDEN) -> Path:
    """Unpack `case` into `out/case` and return that folder; a complete one is taken as it is.

    The folder appears by one rename, so several processes may ask for it at once. Raises ValueError
    for an unknown case or a file that is not the listed one.
    """
    target = out / case
    if target.is_dir():
        return target
    parts = sorted(packed.glob(f"{case}.tar.xz.*"))
    if not parts:
        raise ValueError(f"no golden case {case!r}, there are: {', '.join(cases(packed))}")
    out.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{case}-", dir=out))
    try:
        data = lzma.decompress(b"".join(part.read_bytes() for part in parts))
        _extract(data, scratch / case)
        _verify(case, scratch, packed)
        try:
            os.rename(scratch / case, target)
        except OSError:
            # Somebody else was faster; theirs is as good.
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _extract(archive: bytes, folder: Path) -> None:
    """Write the files of a tar into `folder`, by their last name only: nothing lands elsewhere."""
    folder.mkdir()
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for entry in tar:
            content = tar.extractfile(entry)
            if content is not None:
                (folder / Path(entry.name).name).write_bytes(content.read())


def _verify(case: str, folder: Path, packed: Path) -> None:
    wanted = {}
    for line in (packed / SUMS).read_text(encoding="utf-8").splitlines():
        digest, name = line.split("  ", 1)
        if name.startswith(f"{case}/"):
            wanted[name] = digest
    found = {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }
    wrong = sorted(name for name in wanted.keys() | found if wanted.get(name) != found.get(name))
    if wrong:
        raise ValueError(f"golden files differ from {SUMS}: {', '.join(wrong)}")


def main(arguments: list[str]) -> int:
    """Command line; see the top of the file."""
    match arguments:
        case ["pack", source, packed]:
            pack(Path(source), Path(packed))
        case ["unpack", out, *names]:
            try:
                for name in names or cases():
                    print(unpack(name, Path(out)))
            except ValueError as error:
                print(f"error: {error}", file=sys.stderr)
                return 1
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
