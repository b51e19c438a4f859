#!/usr/bin/env python3
"""Shows check_cuda_build what ptxas says of sound and of unsound kernels."""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import io
import sys
import tempfile
import unittest
from pathlib import Path

sys.dont_write_bytecode = True
LOADER = importlib.machinery.SourceFileLoader(
    "check_cuda_build", str(Path(__file__).resolve().parent / "check_cuda_build")
)
tool = importlib.util.module_from_spec(importlib.util.spec_from_loader(LOADER.name, LOADER))
sys.modules[LOADER.name] = tool
LOADER.exec_module(tool)


def kernel(name: str, stores: int = 0, loads: int = 0, registers: int = 168) -> str:
    return (
        f"ptxas info    : Compiling entry function '{name}' for 'sm_90a'\n"
        f"ptxas info    : Function properties for {name}\n"
        f"    8 bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads\n"
        f"ptxas info    : Used {registers} registers, used 1 barriers\n"
    )


LOSS = (
    "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are"
    " serialized due to non wgmma instructions defining accumulator registers in the function"
    " 'slow'\n"
)


class CheckCudaBuild(unittest.TestCase):
    def check(self, text: str, name: str = "a.cu.o.ptxas") -> tuple[int, str]:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / name).write_text(text)
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                status = tool.check(Path(folder))
            return status, out.getvalue()

    def test_a_sound_kernel_passes(self):
        status, out = self.check(kernel("quick"))
        self.assertEqual(status, 0)
        self.assertIn("168 registers  quick", out)

    def test_spills_fail(self):
        for spill in ({"stores": 4}, {"loads": 8}):
            status, out = self.check(kernel("quick") + kernel("full", **spill))
            self.assertEqual(status, 1)
            self.assertIn("full: spills", out)

    def test_serialised_instructions_fail_wherever_they_are_named(self):
        for text in (LOSS + kernel("slow"), kernel("slow") + LOSS, LOSS):
            status, out = self.check(text)
            self.assertEqual(status, 1, text)
            self.assertIn("slow: loses performance: wgmma", out)

    def test_listed_spills_pass_up_to_their_bytes(self):
        tool.ALLOWED.append(("listed", 16, "a reason"))
        try:
            self.assertEqual(self.check(kernel("listed", 8, 8))[0], 0)
            self.assertEqual(self.check(kernel("listed", 8, 12))[0], 1)
        finally:
            tool.ALLOWED.pop()

    def test_a_build_without_kernels_fails(self):
        self.assertEqual(self.check("nothing to see\n")[0], 1)
        # Tests are nobody's product.
        self.assertEqual(self.check(kernel("quick"), "a_test.cu.o.ptxas")[0], 1)

    def test_the_compiler_keeps_its_status_and_its_words(self):
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / "a.o"
            script = "import sys; sys.stderr.write('said'); sys.exit(3)"
            error = io.StringIO()
            with contextlib.redirect_stderr(error):
                status = tool.keep([sys.executable, "-c", script, "-o", str(target)])
            self.assertEqual(status, 3)
            self.assertEqual(error.getvalue(), "said")
            self.assertEqual(Path(f"{target}.ptxas").read_text(), "said")


if __name__ == "__main__":
    unittest.main()
