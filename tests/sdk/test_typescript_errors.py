"""B6: the TypeScript SDK's table of errors is the server's own."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_B6_the_table_of_errors_in_typescript_is_current() -> None:
    script = ROOT / "scripts" / "gen_typescript_errors.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
