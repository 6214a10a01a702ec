"""Runs every script of a package's bench/ and prints their rows as one table; --json FILE keeps them."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

COLUMNS = ("name", "value", "unit", "peer", "ratio", "target", "holds")
FIELDS = {*COLUMNS, "command", "machine"}


def rows_of(script: Path) -> list[dict[str, object]]:
    """The rows that a script writes. Raises ValueError when one lacks a field, CalledProcessError when it fails."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "rows.json"
        subprocess.run([sys.executable, str(script), "--json", str(out)], check=True)
        rows: list[dict[str, object]] = json.loads(out.read_text())
    for row in rows:
        if row.keys() != FIELDS:
            raise ValueError(f"{script}: a row has the fields {sorted(row)}, want {sorted(FIELDS)}")
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package", type=Path, help="the package's folder")
    parser.add_argument("--json", type=Path, help="where to keep the rows")
    options = parser.parse_args()
    scripts = sorted(p for p in (options.package / "bench").glob("*.py") if not p.name.startswith("_"))
    if not scripts:
        parser.error(f"{options.package}/bench holds no script")
    rows = [row for script in scripts for row in rows_of(script)]
    print(*sorted({f"on {row['machine']}" for row in rows}), sep="\n")
    print("  ".join(COLUMNS))
    for row in rows:
        print("  ".join(f"{row[c]:.4g}" if isinstance(row[c], float) else str(row[c]) for c in COLUMNS))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
