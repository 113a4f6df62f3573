"""Compare the speed of two commits: ``compare_commits.py BEFORE AFTER [--benches ...]``.

Builds each commit in a worktree and a virtual environment of its own under ``build/compare``, runs
their benches in turn (BEFORE AFTER, AFTER BEFORE, ...), and prints for each case the median over
the repeats of how many times better AFTER is, then the geometric mean over all cases. A case that
one of the two does not have is named and left out. Run it on a machine that has nothing else to do.

Where the machine's clock changes between runs, ``--to-baseline`` compares ratios to the bench's
baseline, which is measured in turn with ours. It hides a change that slows both, so it does not
serve for cases whose baseline is the project's own code.

Exit status: 1 if the mean or a case is below its bound, or a check fails; 0 otherwise.
"""

import argparse
import json
import math
import shutil
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "build" / "compare"
BENCHES = ("model", "moe", "engine", "store", "cluster")
MIN_MEAN = 0.97
MIN_CASE = 0.90
BENCH_TIMEOUT_S = 900


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """Run a command and return what it printed."""
    return subprocess.run(
        [str(word) for word in command], cwd=cwd, check=True, stdout=subprocess.PIPE, text=True
    ).stdout.strip()


def prepare(commit: str) -> Path:
    """Build a commit, unless that is done; return the Python that has it."""
    digest = run("git", "rev-parse", "--verify", f"{commit}^{{commit}}")
    tree = FOLDER / digest[:12]
    python = tree / ".venv" / "bin" / "python"
    done = tree / ".built"
    if done.exists():
        return python
    if tree.exists():
        run("git", "worktree", "remove", "--force", tree)
    print(f"building {commit} ({digest[:12]})", file=sys.stderr, flush=True)
    run("git", "worktree", "add", "--detach", "--force", tree, digest)
    run(sys.executable, "-m", "venv", "--without-pip", tree / ".venv")
    # The libraries are those of the environment that runs this, for both commits alike.
    own = Path(sys.prefix) / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = tree / ".venv" / own.relative_to(sys.prefix) / "site-packages"
    run(
        sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet",
        "--no-deps", "--no-build-isolation", "--target", site,
        "--config-settings=cmake.define.TANDEM_KERNEL_ISAS=all", ".",
        cwd=tree,
    )  # fmt: skip
    (site / "libraries.pth").write_text(f"{own / 'site-packages'}\n")
    done.touch()
    return python


def measure(python: Path, bench: str) -> dict[str, dict[str, object]]:
    """Run a bench once; return its records by case."""
    result = subprocess.run(
        [str(python), "-P", "-m", "tandem", "bench", bench, "--quick", "--json", "-"],
        stdout=subprocess.PIPE,
        text=True,
        timeout=BENCH_TIMEOUT_S,
        check=False,
        cwd=python.parent,
    )
    records = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    return {f"{bench} {record['case']}": record for record in records}


def compare(
    before: dict[str, object], after: dict[str, object], *, to_baseline: bool = False
) -> float:
    """Return how many times better ``after`` is: by the ratios to the baseline if ``to_baseline``
    and both have the same one, by our own figures otherwise.
    """
    if to_baseline and before["baseline_name"] == after["baseline_name"]:
        old, new = before["ratio"], after["ratio"]
        if isinstance(old, float) and isinstance(new, float):
            return new / old
    old, new = before["ours"], after["ours"]
    assert isinstance(old, float | int)
    assert isinstance(new, float | int)
    is_rate = str(after["unit"]).endswith("/s")
    return new / old if is_rate else old / new


def main(arguments: list[str]) -> int:
    """Compare; return the exit status."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("--benches", nargs="+", default=BENCHES, metavar="NAME")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--to-baseline", action="store_true")
    options = parser.parse_args(arguments)
    pythons = prepare(options.before), prepare(options.after)
    ratios: dict[str, list[float]] = defaultdict(list)
    wrong: set[str] = set()
    for repeat in range(options.repeats):
        for bench in options.benches:
            order = (0, 1) if repeat % 2 == 0 else (1, 0)
            found = {which: measure(pythons[which], bench) for which in order}
            for case in found[0].keys() | found[1].keys():
                if case not in found[0] or case not in found[1]:
                    wrong.add(f"{case}: only in one of the two")
                elif any(found[which][case]["check"] != "ok" for which in order):
                    wrong.add(f"{case}: a check failed")
                else:
                    ratio = compare(found[0][case], found[1][case], to_baseline=options.to_baseline)
                    ratios[case].append(ratio)
    if not ratios:
        print("nothing was measured", *sorted(wrong), sep="\n")
        return 1
    medians = {case: statistics.median(values) for case, values in ratios.items()}
    for case, ratio in sorted(medians.items(), key=lambda item: item[1]):
        spread = f"[{min(ratios[case]):.2f}, {max(ratios[case]):.2f}]"
        print(f"{ratio:6.2f} {spread:>14} n={len(ratios[case])}  {case}")
    mean = math.exp(statistics.fmean(map(math.log, medians.values())))
    print(f"geometric mean over {len(medians)} cases: {mean:.3f}")
    print(*sorted(wrong), sep="\n")
    is_good = mean >= MIN_MEAN and min(medians.values()) >= MIN_CASE
    failed = any("check failed" in line for line in wrong)
    return 0 if is_good and not failed else 1


if __name__ == "__main__":
    if shutil.which("git") is None:
        sys.exit("compare_commits: git is not installed")
    sys.exit(main(sys.argv[1:]))
