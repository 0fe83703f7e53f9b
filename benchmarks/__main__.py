"""`python -m benchmarks [NAME ...] [--published FOLDER] [--out FOLDER]`: runs benchmarks and writes dated results."""

import argparse
import json
import sys
from pathlib import Path

from benchmarks.registry import benchmarks, without_text, write_result


def main() -> int:
    """Exit code 2 where a name is not known, or a benchmark lacks what it reads."""
    known = benchmarks()
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"all by default; known: {', '.join(known)}")
    parser.add_argument("--published", type=Path, help="folder of published runs (and beside it, of cases)")
    parser.add_argument("--out", type=Path, help="folder for the results; without it they are printed alone")
    asked = parser.parse_args()
    unknown = sorted(set(asked.names) - set(known))
    if unknown:
        print(f"benchmark {unknown[0]!r} is not known; known: {', '.join(known)}", file=sys.stderr)
        return 2
    for name in asked.names or known:
        try:
            found = known[name](asked.published)
        except FileNotFoundError as error:
            print(f"{name}: {error}; name the folder with --published", file=sys.stderr)
            if asked.names:
                return 2
            continue
        print(found.get("text") or json.dumps({name: without_text(found)}, indent=1))
        if asked.out:
            print(f"wrote {write_result(name, found, asked.out)}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
