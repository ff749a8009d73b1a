"""ESC-11: engines with known holes. Warned about, or refused where the operator says so, at the start and by `doctor`."""

import json
import shutil
from pathlib import Path

import pytest
from lab.sandboxes import NO_SPARES, Lab

from atoll import errors

WARN = NO_SPARES + '[backend]\ncontainer_engine = "runc"\n'
REFUSE = WARN + '[security]\nversion_floor = "refuse"\n'
WRAPPER = '#!/bin/sh\n[ "$1" = --version ] && { echo "runc version 1.0.0"; exit; }\nexec %s "$@"\n'


@pytest.mark.parametrize("config", [WARN, REFUSE], ids=["warn", "refuse"])
def test_an_old_engine_is_named_or_refused(config: str, tmp_path: Path) -> None:
    """A runc that says it is old: it works with a warning, or no sandbox is started with it and `doctor` fails."""
    real = shutil.which("runc", path="/usr/sbin:/usr/bin:/usr/local/bin")
    if real is None:
        pytest.skip("no runc")
    old = tmp_path / "bin" / "runc"
    old.parent.mkdir()
    old.write_text(WRAPPER % real)
    old.chmod(0o755)
    crun = tmp_path / "bin" / "crun"
    crun.write_text("#!/bin/sh\nexit 1\n")  # there is no other engine to take
    crun.chmod(0o755)
    lab = Lab(config)
    lab.env["PATH"] = f"{old.parent}:{lab.env['PATH']}"
    try:
        told = lab.cli("doctor", "--json")  # starts the daemon, with that PATH
        checks = {check["name"]: check for check in json.loads(told.stdout)["checks"]}
        runtime = checks["runtime container"]
        if config == REFUSE:
            assert not runtime["ok"] and "CVE-2024-21626" in runtime["detail"] and "1.4.3" in runtime["fix"]
            with pytest.raises(errors.Unsupported, match="older than"):
                lab.create(runtime="container")
        else:
            assert runtime["ok"] and "runc 1.0.0 is older" in checks["version floor"]["detail"], checks
            with lab.sandbox(runtime="container") as made:
                assert made.exec("echo works").stdout == "works\n"
    finally:
        lab.close()
