"""What importing the package costs beyond importing torch."""

import subprocess
import sys

from _rows import command_line, machine, report

CODE = """
import time, torch
start = time.process_time()
import m2flow.algos
print(time.process_time() - start)
"""


def main(json_path: str | None) -> None:
    """Measure, print, write."""
    runs = [subprocess.run([sys.executable, "-c", CODE], check=True, capture_output=True, text=True) for _ in range(3)]
    least = min(float(run.stdout) for run in runs)
    report(
        [
            {
                "name": "import m2flow.algos, after torch",
                "value": round(least, 4),
                "unit": "s",
                "peer": None,
                "ratio": None,
                "target": "value <= 0.1",
                "holds": least <= 0.1,
                "command": f"python {sys.argv[0]}",
                "machine": machine(),
            }
        ],
        json_path,
    )


if __name__ == "__main__":
    command_line(main)
