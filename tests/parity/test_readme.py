"""The README's example builds with the README's command and runs."""

import re
import shutil
import subprocess
from pathlib import Path

import mxattn_capi
import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_the_example_of_the_readme_runs(tmp_path):
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no c++ on this machine")
    readme = (ROOT / "README.md").read_text()
    (tmp_path / "step.cc").write_text(re.search(r"```cpp\n(.*?)```", readme, re.S)[1])
    command = re.search(r"^    c\+\+ (-std=.*)$", readme, re.M)[1]
    folder = str(mxattn_capi.library_path().parent)
    command = command.replace("-Iinclude", f"-I{ROOT / 'include'}")
    command = re.sub(r"(\$PWD/)?build/lib", lambda _: folder, command)
    build = [compiler, *command.split(), "-Wall", "-Wextra", "-Werror", "-o", "step"]
    subprocess.run(build, cwd=tmp_path, check=True)
    ran = subprocess.run([tmp_path / "step"], check=True, capture_output=True, text=True)
    # V = 1 everywhere: O = 1, 0x3f80 in BF16.
    assert ran.stdout == "cpu, O[0] = 0x3f80\n"
