"""wheels/build.sh says what is wrong; the wheels themselves are checked by make check-wheel."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_a_python_that_is_not_here_is_named(tmp_path: Path) -> None:
    command = [str(ROOT / "wheels/build.sh"), str(tmp_path), "no-such-python"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("wheels: no no-such-python runs here;")
    assert done.stderr.count("\n") == 1


def test_readme_installs_the_version_that_is_built() -> None:
    version = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.M)
    assert version is not None
    named = re.findall(r"tandem_moe-([\d.]+)-", (ROOT / "README.md").read_text())
    assert set(named) <= {version[1]}
