#!/usr/bin/env python3
"""Shows check_wheel wheels whose tags promise too much, and one that keeps its promise.

usage: check_wheel_test.py LIBRARY

LIBRARY is any shared library of C++; its own needs are read from objdump, not from readelf.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import re
import subprocess
import sys
import tempfile
import unittest
import zipfile
from pathlib import Path

sys.dont_write_bytecode = True
LOADER = importlib.machinery.SourceFileLoader(
    "check_wheel", str(Path(__file__).resolve().parent / "check_wheel")
)
tool = importlib.util.module_from_spec(importlib.util.spec_from_loader(LOADER.name, LOADER))
LOADER.exec_module(tool)


class CheckWheel(unittest.TestCase):
    library: Path

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        symbols = subprocess.run(["objdump", "-T", str(self.library)], check=True,
                                 capture_output=True, text=True).stdout  # fmt: skip
        versions = re.findall(r"GLIBC_(\d+)\.(\d+)", symbols)
        self.glibc = max((int(major), int(minor)) for major, minor in versions)
        headers = subprocess.run(["objdump", "-p", str(self.library)], check=True,
                                 capture_output=True, text=True).stdout  # fmt: skip
        self.needed = set(re.findall(r"NEEDED +(\S+)", headers))

    def problems(self, tag: str, others=(), inner_tag=None) -> list[str]:
        path = self.folder / f"mxattn-1.0-py3-none-{tag}.whl"
        with zipfile.ZipFile(path, "w") as wheel:
            wheel.writestr("mxattn-1.0.dist-info/WHEEL", f"Tag: py3-none-{inner_tag or tag}\n")
            wheel.write(self.library, "mxattn/lib/libmxattn.so")
            for name in others:  # stand-ins that need nothing that is new
                wheel.write(self.library, f"mxattn/lib/{name}")
        return tool.check(path)[1]

    def test_a_tag_that_keeps_its_promise(self):
        others = self.needed - tool.SYSTEM
        self.assertTrue(others, "the library needs nothing: no test of what is inside")
        self.assertEqual(self.problems("manylinux_2_41_x86_64", others), [])

    def test_an_older_glibc_than_is_needed(self):
        major, minor = self.glibc
        found = self.problems(f"manylinux_{major}_{minor - 1}_x86_64", self.needed - tool.SYSTEM)
        self.assertIn(f"glibc {major}.{minor} is needed", found)

    def test_a_library_that_is_not_inside(self):
        found = self.problems("manylinux_2_41_x86_64")
        expected = [f"{name} is needed and not inside" for name in self.needed - tool.SYSTEM]
        self.assertEqual(found, sorted(expected))

    def test_a_tag_of_one_machine(self):
        found = self.problems("linux_x86_64", self.needed - tool.SYSTEM)
        self.assertEqual(found, ["tag linux_x86_64: expected manylinux_X_Y_x86_64"])

    def test_versions_without_a_number(self):
        needs, tag = tool.needs, "manylinux_2_35_x86_64"
        self.addCleanup(setattr, tool, "needs", needs)
        others = self.needed - tool.SYSTEM
        for version, expected in (("ABI_DT_RELR", "2.36 is needed"), ("PRIVATE", "GLIBC_PRIVATE")):
            text = f" Name: GLIBC_2.17  \n Name: GLIBC_{version}  \n"
            tool.needs = lambda library, text=text: (text, needs(library)[1])
            self.assertIn(expected, " ".join(self.problems(tag, others)))

    def test_a_wheel_without_metadata(self):
        path = self.folder / "mxattn-1.0-py3-none-manylinux_2_41_x86_64.whl"
        zipfile.ZipFile(path, "w").close()
        self.assertIn("0 files *.dist-info/WHEEL: expected one", tool.check(path)[1])

    def test_a_name_that_was_only_changed(self):
        others = self.needed - tool.SYSTEM
        found = self.problems("manylinux_2_41_x86_64", others, "linux_x86_64")
        self.assertEqual(len(found), 1)
        self.assertIn("expected the tag of the file's name", found[0])


if __name__ == "__main__":
    CheckWheel.library = Path(sys.argv.pop())
    unittest.main()
