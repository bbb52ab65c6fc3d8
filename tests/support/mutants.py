"""Changes the rules of money and of KV blocks one at a time: does any test notice? `make mutants`.

mutmut works in a copy of the tree, so that nothing half-changed ever lies beside the source. A
mutant that survives fails the run unless `tests/support/equivalent_mutants.py` says why no test
can tell it from the original; so does a reason there that no mutant needs any more.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.support.equivalent_mutants import EQUIVALENT, Change

ROOT = Path(__file__).parents[2]
RESULT = re.compile(r"^\s*(((?:core|worker)\.\w+)\.\S+): (.+)$", re.MULTILINE)
FUNCTION = re.compile(r"\.x(?:ǁ\w+ǁ|_)(\w+?)__mutmut_\d+$")
HISTORIES = "40"  # of the scheduler, for each mutant that nothing smaller notices
NOTICED = ("killed", "timeout")
NOT_ASKED = "not checked"  # when only some were asked for: make mutants ARGS='core.money*'


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="headworks-mutants-") as directory:
        copy = Path(directory)
        copy_tree(copy)
        mutmut(copy, "run", "--max-children", str(os.cpu_count() or 1), *sys.argv[1:], echo=True)
        listed = RESULT.findall(mutmut(copy, "results", "--all", "true"))
        results = [result for result in listed if result[2] != NOT_ASKED]
        changes = {
            name: change_of(name, mutmut(copy, "show", name))
            for name, _, verdict in results
            if verdict not in NOTICED
        }
    return report(results, changes)


def copy_tree(copy: Path) -> None:
    """What git tracks or would track, as it lies here now."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    there = b"\0".join(
        path for path in listed.stdout.split(b"\0") if (ROOT / os.fsdecode(path)).is_file()
    )
    subprocess.run(
        f"tar --null --no-recursion -T - -cf - | tar -xf - -C '{copy}'",
        shell=True,
        cwd=ROOT,
        input=there,
        check=True,
    )


def mutmut(copy: Path, *arguments: str, echo: bool = False) -> str:
    ran = subprocess.run(
        [sys.executable, "-m", "mutmut", *arguments],
        cwd=copy,
        env=os.environ | {"SOAK_SCHEDULER": HISTORIES},
        stdout=None if echo else subprocess.PIPE,
        text=True,
        check=not echo,
    )
    if ran.returncode:
        raise SystemExit(f"mutmut {arguments[0]} failed")
    return ran.stdout or ""


def change_of(name: str, diff: str) -> Change:
    """The function, and its lines before and after."""
    function = FUNCTION.search(name)
    lines = [line for line in diff.splitlines() if not line.startswith(("---", "+++"))]
    return (
        function[1] if function else name,
        " ".join(line[1:].strip() for line in lines if line.startswith("-")),
        " ".join(line[1:].strip() for line in lines if line.startswith("+")),
    )


def report(results: list[tuple[str, str, str]], changes: dict[str, Change]) -> int:
    """Print it; 1 when a mutant got away, or an excuse is out of use."""
    counts = Counter((module, verdict) for _, module, verdict in results)
    for (module, verdict), count in sorted(counts.items()):
        print(f"{module.replace('.', '/')}.py: {count} {verdict}")
    escaped = {name: change for name, change in changes.items() if change not in EQUIVALENT}
    for name, (function, before, after) in escaped.items():
        print(f"\nnot noticed: {name}\n  in {function}\n  - {before}\n  + {after}")
    unused = [] if sys.argv[1:] else [c for c in EQUIVALENT if c not in changes.values()]
    for function, before, after in unused:
        print(f"\nno longer a mutant that survives:\n  in {function}\n  - {before}\n  + {after}")
    noticed = sum(verdict in NOTICED for _, _, verdict in results)
    print(
        f"\n{len(results)} mutants: {noticed} noticed, {len(changes) - len(escaped)} equivalent,"
        f" {len(escaped)} not noticed"
    )
    return int(bool(escaped or unused or not results))


if __name__ == "__main__":
    sys.exit(main())
