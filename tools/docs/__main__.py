"""Write what docs/ has from the code: pictures, and the tables between marks. ``make docs`` runs it.

python tools/docs              write
python tools/docs --check      only tell what is stale; exit code 1 if anything is
python tools/docs --site DIR   look for links of a built site that lead nowhere, and for pictures without words
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
MARKED = re.compile(r"(<!-- generated: (?P<name>[\w ]+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--site", type=Path, metavar="DIR", help="check a built site instead")
    args = parser.parse_args()
    if args.site is not None:
        from site_check import complaints  # noqa: PLC0415 - only here

        found = complaints(args.site)
        print("\n".join(found) or f"{args.site}: every link leads somewhere, every picture has words")
        return 1 if found else 0
    stale = [file for file, text in made().items() if not file.exists() or file.read_text(encoding="utf-8") != text]
    for file in stale:
        print(f"{file.relative_to(ROOT)} {'is stale: run make docs' if args.check else 'written'}")
        if not args.check:
            file.write_text(made()[file], encoding="utf-8")
    return 1 if stale and args.check else 0


def made() -> dict[Path, str]:
    """Return every file of docs/ that has something from the code, as it ought to be."""
    from pictures import PICTURES  # noqa: PLC0415 - heavy
    from tables import TABLES  # noqa: PLC0415 - heavy

    from pagefold.cli.demo import demo_svg  # noqa: PLC0415 - heavy

    files = {DOCS / "pictures" / f"{name}.svg": draw().svg() for name, draw in PICTURES.items()}
    files[DOCS / "demo.svg"] = demo_svg()
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        if MARKED.search(text):
            files[page] = MARKED.sub(lambda mark: f"{mark[1]}\n{TABLES[mark['name']]()}\n\n{mark[3]}", text)
    return files


if __name__ == "__main__":
    sys.exit(main())
