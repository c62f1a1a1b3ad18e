"""Does the test suite find faults? Put one wrong line at a time into a copy of the code and run the tests.

`benchmarks/mutants.yaml` lists the wrong lines (mutants). A mutant is found by its text, so it survives when a file
moves. A mutant counts as killed when a test fails, or when the tests run into the time limit. First its likely tests
run; only if they all pass, the whole suite runs. The results file is written after each mutant, and the same command
continues where it stopped.

    python -m benchmarks.mutants --out new.json                     # all mutants, the tests of this folder
    python -m benchmarks.mutants --tree DIR --only NAME NAME        # some mutants, another folder
    python -m benchmarks.mutants --compare benchmarks/mutants-old.json new.json

Exit code 1: a mutant survived, or `--compare` found a mutant that only the first suite killed. Exit code 2: a mutant
does not fit the code any more, or the tests fail without any mutant.
"""

import argparse
import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

HERE = Path(__file__).resolve().parent
PRODUCT = ("harness", "methods", "plots", "run.py")
NOT_COPIED = shutil.ignore_patterns(".git", ".venv*", "*_cache", ".hypothesis", "__pycache__", "runs", "build")
FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", re.M)
PASSED, NO_TESTS = 0, 5
TIME_LIMIT = "time limit"


class Mutant(NamedTuple):
    """One wrong line. breaks: in plain words. file: where it was when it was written. old, new: the text to replace.
    tests: the test files most likely to fail; a file that does not exist is ignored."""

    name: str
    breaks: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def place(self, tree: Path) -> tuple[Path | None, int]:
        """The product file that holds the old text, and how often all product files together hold it."""
        files = [each for top in PRODUCT for each in ((tree / top).rglob("*.py") if "." not in top else [tree / top])]
        counts = {each: each.read_text(encoding="utf-8").count(self.old) for each in files if each.is_file()}
        return max(counts, key=lambda each: counts[each]) if counts else None, sum(counts.values())


class Suite:
    """A copy of a tree, and pytest in it. limit: seconds a run may take. workers: pytest-xdist's processes for the
    whole suite, "" for one process without it. left_out: tests that are not run."""

    def __init__(self, tree: Path, folder: Path, limit: float, workers: str, left_out: Sequence[str]) -> None:
        self.limit, self.cache = limit, folder / "cache"
        self.parallel = ["-n", workers] if workers else []
        self.left_out = [option for test in left_out for option in ("--deselect", test)]
        self.copy = shutil.copytree(tree, folder / "tree", ignore=NOT_COPIED, symlinks=True)

    def failing(self, what: Sequence[str], *options: str) -> list[str]:
        """The tests that fail. Past the time limit the run is killed with its children."""
        shutil.rmtree(self.cache / "calibration", ignore_errors=True)  # another mutant may have computed it
        command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider"]
        command += [*options, *self.left_out, *what]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "KV_HARNESS_CACHE": str(self.cache)}
        with subprocess.Popen(
            command, cwd=self.copy, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        ) as run:  # fmt: skip
            try:
                output, _ = run.communicate(timeout=self.limit)
            except subprocess.TimeoutExpired:
                os.killpg(run.pid, signal.SIGKILL)
                return [TIME_LIMIT]
        if run.returncode in (PASSED, NO_TESTS):
            return []
        return FAILED.findall(output) or [f"pytest exit code {run.returncode}: {output[-300:]}"]

    def check(self, tests: Sequence[str]) -> list[str]:
        """The tests that fail without a mutant; says so on stderr."""
        broken = self.failing(tests, *self.parallel) if tests else []
        for test in broken:
            print(f"fails without any mutant; repair it, or leave it out with --deselect: {test}", file=sys.stderr)
        return broken

    def try_out(self, mutant: Mutant, *, whole: bool) -> dict[str, Any]:
        """The result of one mutant. whole: run the whole suite if the likely tests pass."""
        began, ran, killers = time.perf_counter(), "likely tests", list[str]()
        path, _ = mutant.place(self.copy)
        assert path is not None
        sound = path.read_text(encoding="utf-8")
        try:
            _write(path, sound.replace(mutant.old, mutant.new))
            likely = [each for each in mutant.tests if (self.copy / each).is_file()]
            killers = self.failing(likely, "-x") if likely else []
            if not killers and whole:
                ran, killers = "whole suite", self.failing(["tests"], "-x", *self.parallel)
        finally:
            _write(path, sound)
        return {"killed_by": killers[0] if killers else None, "ran": ran, "seconds": round(time.perf_counter() - began)}


def _write(path: Path, text: str) -> None:
    """Write a source file; its bytecode goes, as Python may take it for that of the new text."""
    path.write_text(text, encoding="utf-8")
    for stale in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
        stale.unlink()


def read(tree: Path, only: Sequence[str]) -> list[Mutant]:
    """The mutants to try. Raises SystemExit(2) for one that does not fit the code exactly once, or does not compile."""
    listed = yaml.safe_load((HERE / "mutants.yaml").read_text(encoding="utf-8"))
    mutants = [Mutant(**{**each, "tests": tuple(each["tests"])}) for each in listed]
    errors = [f"{name}: no such mutant" for name in only if name not in {each.name for each in mutants}]
    for each in mutants:
        path, count = each.place(tree)
        if count != 1 or path is None:
            errors.append(f"{each.name}: its old text ({each.file}) occurs {count} times, not once; update it")
            continue
        try:
            ast.parse(path.read_text(encoding="utf-8").replace(each.old, each.new))
        except SyntaxError as error:
            errors.append(f"{each.name}: does not compile ({error})")
    if errors:
        print("\n".join(errors), file=sys.stderr)
        raise SystemExit(2)
    return [each for each in mutants if not only or each.name in only]


def save(path: Path, results: dict[str, Any]) -> None:
    """Replace the results file in one step."""
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    scratch.replace(path)


def compare(first: Path, second: Path) -> int:
    """List the mutants that the first suite killed and the second did not."""
    old, new = (json.loads(path.read_text(encoding="utf-8")) for path in (first, second))
    lost = [name for name, result in old.items() if result["killed_by"] and not new.get(name, {}).get("killed_by")]
    for name in lost:
        print(f"{name}: {'survived' if name in new else 'not run'}; before killed by {old[name]['killed_by']}")
    print(f"{len(lost)} mutants were killed by {first.name} and not by {second.name}")
    return int(bool(lost))


def main(argv: Sequence[str] | None = None) -> int:
    """Try the mutants and print a table; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutants", description="Which faults do the tests find?")
    parser.add_argument("--tree", type=Path, default=HERE.parent, help="the project folder to test (default: this one)")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="try these mutants")
    parser.add_argument("--out", type=Path, default=Path("mutants.json"), help="results file (default: mutants.json)")
    parser.add_argument("--limit", type=float, default=3600, help="seconds of one pytest run, at most (default: 3600)")
    parser.add_argument("-n", default="", metavar="WORKERS", help="processes of pytest-xdist for the whole suite")
    parser.add_argument("--likely", action="store_true", help="run the likely tests only")
    parser.add_argument("--deselect", nargs="+", default=[], metavar="TEST", help="tests that are not run")
    parser.add_argument("--no-check", action="store_true", help="do not run the tests without a mutant first")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("OLD", "NEW"), help="compare two results files")
    args = parser.parse_args(argv)
    if args.compare:
        return compare(*args.compare)
    mutants = read(args.tree, args.only)
    results = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {}
    done = {name for name, each in results.items() if each["killed_by"] or args.likely or each["ran"] == "whole suite"}
    todo = [each for each in mutants if each.name not in done]
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        suite = Suite(args.tree, Path(name), args.limit, args.n, args.deselect)
        likely = sorted({test for each in todo for test in each.tests if (args.tree / test).is_file()})
        if not args.no_check and suite.check(likely):
            return 2
        for number, mutant in enumerate(todo, 1):
            results[mutant.name] = suite.try_out(mutant, whole=not args.likely)
            save(args.out, results)
            print(f"{number}/{len(todo)} {_line(mutant, results[mutant.name])}", flush=True)
        killers = {result["killed_by"] for result in results.values()} - {None, TIME_LIMIT}
        if broken := suite.check(sorted(killers)):  # such a test kills nothing: what it was said to kill is tried again
            save(args.out, {name: each for name, each in results.items() if each["killed_by"] not in broken})
            return 2
    survivors = [each for each in mutants if not results[each.name]["killed_by"]]
    print("", *(_line(each, results[each.name]) for each in mutants), sep="\n")
    seconds = sum(results[each.name]["seconds"] for each in mutants)
    print(f"\n{len(mutants) - len(survivors)} of {len(mutants)} killed in {seconds / 60:.0f} minutes; survived:")
    print("\n".join(f"  {each.name}: {each.breaks}" for each in survivors) or "  none")
    return int(bool(survivors))


def _line(mutant: Mutant, result: dict[str, Any]) -> str:
    return f"{mutant.name:36} {result['seconds']:5} s  {result['killed_by'] or 'SURVIVED (' + result['ran'] + ')'}"


if __name__ == "__main__":
    sys.exit(main())
