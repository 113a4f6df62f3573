"""Write the software bill of materials of a wheel, in CycloneDX's JSON (version 1.6).

    python tools/sbom.py tandem_llm-0.1.0-cp311-cp311-linux_x86_64.whl --out wheel.cdx.json

Run it with the interpreter of a venv into which the wheel is installed: the components are what
lies in the wheel (vendored scripts with their hashes, code compiled into the extension) and the
packages that are installed beside it because it requires them, with the versions and licences of
their own metadata. Needs nothing but Python.
"""

import argparse
import hashlib
import json
import re
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

NAME = "tandem-llm"
VENDOR = "tandem/server/page/static/vendor/"
VENDORED = {
    # File, and where its version stands in its first bytes: npm's name, SPDX id.
    "highlight.mjs": ("@highlightjs/cdn-assets", "BSD-3-Clause", r"Highlight\.js v([\d.]+)"),
    "markdown-it.mjs": ("markdown-it", "MIT", r"markdown-it ([\d.]+)"),
    "purify.mjs": ("dompurify", "MPL-2.0 OR Apache-2.0", r"DOMPurify ([\d.]+)"),
    "uplot.mjs": ("uplot", "MIT", r"\(v([\d.]+)\)"),
}
COMPILED = {"nanobind": "BSD-3-Clause", "robin-map": "MIT", "ggml": "MIT"}
"""Code of others in the extension, each with a file in ``native/licenses``: the bindings, the map
that they bring, and tables of llama.cpp's block types."""
SPDX = {
    "mit": "MIT",
    "mit license": "MIT",
    "the mit license": "MIT",
    "bsd": "BSD-3-Clause",
    "bsd license": "BSD-3-Clause",
    "bsd 3-clause": "BSD-3-Clause",
    "3-clause bsd license": "BSD-3-Clause",
    "apache 2.0": "Apache-2.0",
    "apache 2.0 license": "Apache-2.0",
    "apache": "Apache-2.0",
    "apache license 2.0": "Apache-2.0",
    "apache software license": "Apache-2.0",
    "apache license, version 2.0": "Apache-2.0",
    "python software foundation license": "PSF-2.0",
    "mozilla public license 2.0 (mpl 2.0)": "MPL-2.0",
    "isc license (iscl)": "ISC",
    "isc": "ISC",
    "mpl-2.0": "MPL-2.0",
    "psf-2.0": "PSF-2.0",
}
"""Names that packages give their licences, beside SPDX's own."""
PARTS = {
    "What the wheel requires": set[str](),
    "What the extra serve requires": {"serve"},
    "What the extra finetune requires": {"serve", "finetune"},
}
REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)(?:\[([\w, -]+)\])?")
EXTRA = re.compile(r"extra\s*==\s*['\"]([\w-]+)['\"]")


def normalize(name: str) -> str:
    """Return a package's name as the index spells it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def find_licence(package: Any) -> str:
    """Return the licence that a package's metadata states, by its SPDX id where it is known."""
    expression = package.get("License-Expression")
    if expression:
        return expression
    stated = [
        line.rsplit(" :: ", 1)[1]
        for line in package.get_all("Classifier") or []
        if line.startswith("License :: ") and line.count(" :: ") > 1
    ]
    text = (package.get("License") or "").strip()
    if not stated and text:
        stated = [text.splitlines()[0]]
    return " AND ".join(sorted({SPDX.get(each.lower(), each) for each in stated})) or "unknown"


def list_requirements(name: str, extras: set[str]) -> Iterator[tuple[str, set[str]]]:
    """Yield what a package with some of its extras requires: names, and extras of those."""
    for line in metadata.requires(name) or []:
        extra = EXTRA.search(line)
        match = REQUIREMENT.match(line)
        if match and (extra is None or extra[1] in extras):
            yield normalize(match[1]), set(re.findall(r"[\w-]+", match[2] or ""))


@dataclass
class Installed:
    """A package that ours requires, as it is installed here."""

    package: metadata.Distribution
    requires: set[str]
    """Names, also those of the extras that others ask of it; not all need be installed."""

    @property
    def licence(self) -> str:
        """The licence that its metadata states."""
        return find_licence(self.package.metadata)


def list_installed(extras: set[str]) -> dict[str, Installed]:
    """Return the packages that ours requires and that are installed here, by name."""
    found: dict[str, Installed] = {}
    pending, seen = list(list_requirements(NAME, extras)), set[tuple[str, frozenset[str]]]()
    while pending:
        name, wanted = pending.pop()
        if (name, frozenset(wanted)) in seen or name == NAME:
            continue
        seen.add((name, frozenset(wanted)))
        if name not in found:
            try:
                found[name] = Installed(metadata.distribution(name), set())
            except metadata.PackageNotFoundError:
                continue  # For another platform, or of an extra that is not installed.
        required = list(list_requirements(name, wanted))
        found[name].requires.update(each for each, _ in required)
        pending += required
    return dict(sorted(found.items()))


def name_licence(licence: str) -> list[dict[str, Any]]:
    """Return a licence as CycloneDX has it: an SPDX expression, or a name."""
    is_spdx = licence in SPDX.values() or re.fullmatch(
        r"[A-Za-z0-9.+-]+(?: (?:AND|OR|WITH) [A-Za-z0-9.+-]+)*", licence
    )
    if licence != "unknown" and is_spdx:
        return [{"expression": licence}]
    return [{"license": {"name": licence}}]


def list_vendored(archive: zipfile.ZipFile) -> Iterator[dict[str, Any]]:
    """Yield the scripts of others that lie in a wheel; raises KeyError for an unknown one."""
    for path in archive.namelist():
        if not path.startswith(VENDOR) or not path.endswith(".mjs"):
            continue
        name, licence, pattern = VENDORED[path.removeprefix(VENDOR)]
        content = archive.read(path)
        version = re.search(pattern, content[:400].decode())
        if version is None:
            raise ValueError(f"{path}: no version in its first lines")
        yield {
            "type": "library",
            "bom-ref": path,
            "name": name,
            "version": version[1],
            "purl": f"pkg:npm/{name.replace('@', '%40')}@{version[1]}",
            "licenses": name_licence(licence),
            "hashes": [{"alg": "SHA-256", "content": hashlib.sha256(content).hexdigest()}],
            "properties": [{"name": "tandem:file", "value": path}],
        }


def make_bom(wheel: Path, extras: set[str]) -> dict[str, Any]:
    """Return the bill of a wheel and of what is installed for it here."""
    version = metadata.version(NAME)
    ours = {
        "type": "application",
        "bom-ref": NAME,
        "name": NAME,
        "version": version,
        "purl": f"pkg:pypi/{NAME}@{version}",
        "licenses": name_licence("Apache-2.0"),
        "hashes": [
            {"alg": "SHA-256", "content": hashlib.sha256(wheel.read_bytes()).hexdigest()}
        ],
    }  # fmt: skip
    with zipfile.ZipFile(wheel) as archive:
        inside = list(list_vendored(archive))
    inside += [
        {"type": "library", "bom-ref": f"compiled/{name}", "name": name,
         "licenses": name_licence(licence),
         "properties": [{"name": "tandem:file", "value": "tandem/_native/_core"}]}
        for name, licence in COMPILED.items()
    ]  # fmt: skip
    installed = list_installed(extras)
    beside = [
        {"type": "library", "bom-ref": name, "name": name, "version": each.package.version,
         "purl": f"pkg:pypi/{name}@{each.package.version}",
         "licenses": name_licence(each.licence)}
        for name, each in installed.items()
    ]  # fmt: skip
    edges = [
        {"ref": name, "dependsOn": sorted(each.requires & set(installed))}
        for name, each in installed.items()
    ]
    direct = sorted({n for n, _ in list_requirements(NAME, extras) if n in installed})
    edges.insert(0, {"ref": NAME, "dependsOn": [*(each["bom-ref"] for each in inside), *direct]})
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": ours},
        "components": [*inside, *beside],
        "dependencies": edges,
    }


def render_page() -> str:
    """Return the page of licences, of what is installed here."""
    lines = [
        "# Licences",
        "",
        "Written by `python tools/sbom.py --page docs/licences.md` from the metadata of installed",
        "packages. Their versions differ from machine to machine: the bill of materials of a wheel",
        "(`tools/sbom.py WHEEL --out FILE`, CycloneDX) has them. Tandem is under Apache-2.0.",
        "",
        "## In the wheel",
        "",
        "| What | Licence | Where |",
        "|---|---|---|",
    ]
    lines += [
        f"| {name} | {licence} | `{VENDOR}{file}` |"
        for file, (name, licence, _) in VENDORED.items()
    ]
    lines += [f"| {name} | {licence} | the extension |" for name, licence in COMPILED.items()]
    lines.append("")
    seen: set[str] = set()
    for title, extras in PARTS.items():
        lines += [f"## {title}", "", "| Package | Licence |", "|---|---|"]
        for name, each in list_installed(extras).items():
            if name not in seen:
                lines.append(f"| {name} | {each.licence} |")
                seen.add(name)
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Write the bill, or the page."""
    parser = argparse.ArgumentParser(description="Write the bill of materials of a wheel.")
    parser.add_argument("wheel", type=Path, nargs="?")
    parser.add_argument("--out", type=Path, help="the bill")
    parser.add_argument("--extras", default="", help="of ours, by commas, as they are installed")
    parser.add_argument("--page", type=Path, help="write the page of licences instead")
    options = parser.parse_args()
    if options.page is not None:
        options.page.write_text(render_page(), encoding="utf-8")
        return
    if options.wheel is None or options.out is None:
        parser.error("name a wheel, and the file to write with --out")
    bom = make_bom(options.wheel, set(filter(None, options.extras.split(","))))
    options.out.write_text(json.dumps(bom, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(f"{options.out}: {len(bom['components'])} components\n")


if __name__ == "__main__":
    main()
