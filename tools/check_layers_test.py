#!/usr/bin/env python3
"""Plants each violation in a small sound tree and sees check_layers find it, and only it."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import tempfile
import unittest
from pathlib import Path

sys.dont_write_bytecode = True
LOADER = importlib.machinery.SourceFileLoader(
    "check_layers", str(Path(__file__).resolve().parent / "check_layers")
)
check_layers = importlib.util.module_from_spec(importlib.util.spec_from_loader(LOADER.name, LOADER))
sys.modules[LOADER.name] = check_layers
LOADER.exec_module(check_layers)

SOUND = {
    "CMakeLists.txt": "# -ffast-math would be wrong here\nadd_compile_options(-ffp-contract=off)\n",
    "include/mxattn/mxattn.h": "#pragma once\n#include <stdint.h>\n",
    "src/base/CMakeLists.txt": "mxattn_room(NAME base)\n",
    "src/base/error.h": "#pragma once\n// printf(), abort() and 448 in a comment harm nobody\n",
    "src/ptx/mma.h": '#include "base/error.h"\ninline void f() { asm volatile("mma;"); }\n',
    "src/tile/ring.h": '#include "ptx/mma.h"\n',
    "src/formats/CMakeLists.txt": "mxattn_room(NAME formats\n            DEPENDS base)\n",
    "src/formats/e4m3.h": '#include "base/error.h"\ninline constexpr float kMax = 448.0f;\n',
    "src/recipe/CMakeLists.txt": "mxattn_room(NAME recipe DEPENDS formats)\n",
    "src/recipe/stages.h": '#include "formats/e4m3.h"\nconstexpr double kLog2E = 1.442695;\n',
    "src/pack/CMakeLists.txt": "mxattn_room(NAME pack DEPENDS base)\n",
    "src/pack/pack.h": '#include "base/error.h"\nconstexpr int kTokens = 256;\n',
    "src/quantize/CMakeLists.txt": "mxattn_room(NAME quantize DEPENDS pack recipe)\n",
    "src/quantize/operand.h": '#include "pack/pack.h"\n#include "recipe/stages.h"\n',
    "src/quantize/cpu/quantize.cc": '#include "quantize/operand.h"\n#include "hwy/highway.h"\n',
    "src/quantize/cuda/quantize.cu": '#include "quantize/operand.h"\n#include "tile/ring.h"\n',
    "src/plan/CMakeLists.txt": "mxattn_room(NAME plan DEPENDS quantize)\n",
    "src/plan/plan.h": '#include "quantize/operand.h"\n',
    "src/kernels/kernel.h": '#include "plan/plan.h"\n',
    "src/kernels/cpu/CMakeLists.txt": "mxattn_room(NAME kernels_cpu DEPENDS plan TESTS e.cc)\n",
    "src/kernels/cpu/exact.h": '#include "kernels/kernel.h"\n',
    "src/kernels/cpu/exact.cc": '#include "exact.h"\nint x = snprintf(b, 9, "exit(1) 448");\n',
    "src/kernels/cpu/exact_test.cc": '#include <gtest/gtest.h>\n#include "kernels/cpu/exact.h"\n'
    '#include "support/random.h"\nvoid f() { printf("448"); }\nint n = 448;\n',
    "src/kernels/cpu/simd-inl.h": "using namespace mxattn::stages;\n",
    "src/kernels/cpu/matrix_x86.cc": "#include <immintrin.h>\nvoid f() { _tile_zero(0); }\n"
    'void g() { __asm__ volatile("" : : : "memory"); }\n',
    "src/kernels/sm90/launch.cu": '#include "kernels/kernel.h"\n#include "tile/ring.h"\n',
    "src/api/CMakeLists.txt": "mxattn_room(NAME api DEPENDS kernels_cpu)\n",
    "src/api/api.cc": '#include "mxattn/mxattn.h"\n#include "kernels/cpu/exact.h"\n',
    "cli/CMakeLists.txt": "target_link_libraries(cli PRIVATE mxattn fmt::fmt)\n",
    "cli/main.cc": '#include <fmt/core.h>\n#include "mxattn/mxattn.h"\nvoid f() { printf(""); }\n',
    "tests/support/random.h": '#include "base/error.h"\n',
    "tests/parity/all_test.cc": '#include "mxattn/mxattn.h"\n#include "support/random.h"\n',
}

# (name, file, line added to its end, rule that must fire)
PLANTS = [
    ("upward", "src/base/error.h", '#include "pack/pack.h"', "layers"),
    ("sideways", "src/pack/pack.h", '#include "recipe/stages.h"', "layers"),
    ("relative path", "src/base/error.h", '#include "../pack/pack.h"', "layers"),
    ("backends", "src/kernels/sm90/launch.cu", '#include "kernels/cpu/exact.h"', "layers"),
    ("quantisers", "src/quantize/cuda/quantize.cu", '#include "../cpu/quantize.cc"', "layers"),
    ("unknown room", "src/misc/odd.h", "#pragma once", "layers"),
    ("header sees src", "include/mxattn/mxattn.h", '#include "../../src/base/error.h"', "layers"),
    ("room sees include", "src/pack/pack.h", "#include <mxattn/mxattn.h>", "layers"),
    ("cli sees src", "cli/main.cc", '#include "recipe/stages.h"', "layers"),
    ("bench sees src", "bench/b.cc", '#include "../src/base/error.h"', "layers"),
    ("audit sees src", "audit/a.cc", '#include "base/error.h"', "layers"),
    ("parity sees src", "tests/parity/all_test.cc", '#include "base/error.h"', "layers"),
    ("source sees tests", "src/pack/pack.h", '#include "support/random.h"', "layers"),
    ("missing file", "src/pack/pack.h", '#include "pack/gone.h"', "include"),
    ("asm", "src/tile/ring.h", 'void g() { asm volatile("nop;"); }', "asm"),
    ("asm keyword", "src/kernels/cpu/exact.cc", 'void g() { __asm__("nop"); }', "asm"),
    ("asm beside intrinsics", "src/kernels/cpu/matrix_x86.cc", 'void h() { asm("nop"); }', "asm"),
    ("intrinsics header", "src/kernels/cpu/exact.cc", "#include <immintrin.h>", "intrinsics"),
    ("arm header", "src/kernels/cpu/exact.cc", "#include <arm_neon.h>", "intrinsics"),
    ("intrinsic", "src/quantize/cpu/quantize.cc", "auto v = _mm512_setzero_ps();", "intrinsics"),
    ("torch", "src/api/api.cc", "#include <torch/extension.h>", "foreign"),
    ("aten", "include/mxattn/mxattn.h", "#include <ATen/ATen.h>", "foreign"),
    ("python", "src/api/api.cc", "#include <Python.h>", "foreign"),
    ("highway", "src/recipe/stages.h", '#include "hwy/highway.h"', "third-party"),
    ("json", "src/api/api.cc", "#include <nlohmann/json.hpp>", "third-party"),
    ("gtest", "src/kernels/cpu/exact.cc", "#include <gtest/gtest.h>", "third-party"),
    ("448", "src/plan/plan.h", "float m = 448.0f;", "numerics"),
    ("448 integer", "cli/main.cc", "int m = 448;", "numerics"),
    ("256.0", "src/kernels/cpu/exact.cc", "auto p = 256.0 * q;", "numerics"),
    ("256.f", "src/kernels/sm90/launch.cu", "auto p = 256.f * q;", "numerics"),
    ("log2 e", "src/api/api.cc", "double e = 1.4426950408889634;", "numerics"),
    ("cout", "src/api/api.cc", 'void g() { std::cout << ""; }', "talks"),
    ("printf", "src/base/error.h", 'void g() { std::printf("x"); }', "talks"),
    ("fprintf", "src/base/error.h", 'void g() { fprintf(stderr, "x"); }', "talks"),
    ("exit", "src/plan/plan.h", "void g() { exit(1); }", "talks"),
    ("abort", "src/plan/plan.h", "void g() { std::abort(); }", "talks"),
    ("assert", "src/plan/plan.h", "void g() { assert(x); }", "talks"),
    ("using", "src/pack/pack.h", "using namespace std;", "using"),
    ("using in tests", "tests/support/random.h", "using namespace mxattn;", "using"),
    ("pragma", "src/pack/pack.h", '#pragma GCC optimize("fast-math")', "fast-math"),
    ("flag", "CMakeLists.txt", "add_compile_options(-ffast-math)", "fast-math"),
    ("flag of a part", "cmake/x.cmake", "set(F -fassociative-math)", "fast-math"),
    ("nvcc flag", "cmake/x.cmake", "set(F --use_fast_math)", "fast-math"),
    ("contraction", "src/base/CMakeLists.txt", "add(-ffp-contract=fast)", "fast-math"),
    ("script", "dev", "CXXFLAGS=-Ofast make", "fast-math"),
    ("build upward", "src/base/CMakeLists.txt", "mxattn_room(NAME base DEPENDS pack)", "build"),
    ("build unknown", "src/base/CMakeLists.txt", "mxattn_room(NAME odd)", "build"),
    ("build misses", "src/quantize/CMakeLists.txt", "mxattn_room(NAME quantize)", "build"),
    ("cli links a room", "cli/CMakeLists.txt", "target_link_libraries(c mxattn_base)", "build"),
]


def plant_tree(root: Path, tree: dict[str, str]) -> None:
    for path, text in tree.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


class CheckLayersTest(unittest.TestCase):
    def findings(self, tree: dict[str, str]):
        with tempfile.TemporaryDirectory() as folder:
            plant_tree(Path(folder), tree)
            return check_layers.check(Path(folder))

    def test_a_sound_tree_has_no_finding(self):
        self.assertEqual([str(f) for f in self.findings(SOUND)], [])

    def test_every_planted_violation_is_found(self):
        for name, path, text, rule in PLANTS:
            with self.subTest(name):
                tree = dict(SOUND)
                tree[path] = tree.get(path, "") + text + "\n"
                found = self.findings(tree)
                last = tree[path].count("\n")
                where = {(f.path, f.rule) for f in found}
                if rule == "build":  # speaks of the include that lacks its target
                    self.assertIn(rule, {f.rule for f in found})
                    continue
                self.assertIn((path, rule), where, [str(f) for f in found])
                if rule != "layers":  # the build check may speak of the same include
                    self.assertEqual(where, {(path, rule)})
                    self.assertEqual({f.line for f in found}, {last})

    def test_every_rule_is_planted(self):
        rules = {"layers", "include", "asm", "intrinsics", "foreign", "third-party", "numerics"}
        rules |= {"talks", "using", "fast-math", "build"}
        self.assertEqual({plant[3] for plant in PLANTS}, rules)

    def test_the_stream_has_no_cycle(self):
        for room in check_layers.NEAREST:
            self.assertNotIn(room, check_layers.closure(check_layers.NEAREST, room))

    def test_comments_and_strings_are_no_code(self):
        strip = check_layers.strip_cpp
        self.assertEqual(strip('a "//" b // c\nd').split(), ["a", '""', "b", "d"])
        self.assertEqual(strip("x /* 1\n2 */ y").count("\n"), 1)
        self.assertEqual(strip("n = 1'000'000; // z").strip(), "n = 1'000'000;")
        self.assertEqual(strip("c = '\"'; d // \"").strip(), 'c = ""; d')


if __name__ == "__main__":
    unittest.main()
