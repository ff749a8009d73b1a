"""A revision that can be run: its files in a worktree, its binaries, and an interpreter that imports it and nothing of another."""

import filecmp
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[2]
CRATES = {"guest": "atoll-guest", "launcher": "atoll-launch"}


class Revision:
    """One of the two sides, below `work`."""

    def __init__(self, name: str, revision: str, work: Path) -> None:
        self.name = name
        self.commit = _git("rev-parse", "--verify", f"{revision}^{{commit}}")
        self.tree = work / name
        self._work = work

    @property
    def python(self) -> str:
        return str(self.tree / ".venv" / "bin" / "python")

    def make(self) -> None:
        """Check it out and set it up; what equals this checkout is taken from it."""
        _git("worktree", "add", "--detach", "--quiet", str(self.tree), self.commit)
        if self._same("requirements.lock"):
            self._borrow_packages()
        else:
            _run(["make", "--silent", ".venv/.done"], self.tree)
        for crate, binary in CRATES.items():
            self._build(crate, binary)
        _run([self.python, "-m", "compileall", "-q", "src/atoll"], self.tree)

    def remove(self) -> None:
        subprocess.run(["git", "worktree", "remove", "--force", str(self.tree)], cwd=ROOT, capture_output=True)

    def _borrow_packages(self) -> None:
        """An interpreter of its own that finds this checkout's packages, without this checkout's atoll."""
        _run([sys.executable, "-m", "venv", "--without-pip", ".venv"], self.tree)
        inside = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
        site = Path(_run([self.python, "-c", inside], self.tree))
        paths = [self.tree / "src", self.tree / "sdk" / "python", Path(sysconfig.get_paths()["purelib"])]
        (site / "compared.pth").write_text("".join(f"{path}\n" for path in paths))

    def _build(self, crate: str, binary: str) -> None:
        target = self.tree / "src" / "atoll" / "_bin" / binary
        ours = ROOT / "src" / "atoll" / "_bin" / binary
        target.parent.mkdir(exist_ok=True)
        clean = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", crate], cwd=ROOT).returncode == 0
        is_ours = clean and _git("rev-parse", f"{self.commit}:{crate}") == _git("rev-parse", f"HEAD:{crate}")
        if is_ours and ours.exists():
            shutil.copy2(ours, target)
            return
        built = self._work / "target" / crate  # both revisions use the libraries that either has built
        if self._same(f"{crate}/Cargo.lock"):
            if not built.exists() and (ROOT / crate / "target").is_dir():
                shutil.copytree(ROOT / crate / "target", built, symlinks=True)
            built.mkdir(parents=True, exist_ok=True)
            (self.tree / crate / "target").symlink_to(built)
        _run(["make", "--silent", f"src/atoll/_bin/{binary}"], self.tree)

    def _same(self, path: str) -> bool:
        """Whether a file is the same here and in this checkout."""
        return filecmp.cmp(self.tree / path, ROOT / path, shallow=False)


def prune() -> None:
    subprocess.run(["git", "worktree", "prune"], cwd=ROOT, capture_output=True)


def _git(*words: str) -> str:
    return _run(["git", *words], ROOT)


def _run(argv: list[str], where: Path) -> str:
    done = subprocess.run(argv, cwd=where, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip()[-1000:]}")
    return done.stdout.strip()
