#!/usr/bin/env python3
"""Writes src/ptx/wgmma.h: the FP8 warpgroup MMA of sm_90a, one struct for each N that kernels use.

Usage: tools/gen_wgmma.py > src/ptx/wgmma.h
"""

WIDTHS = (8, 64, 72, 128, 136)

HEADER = """// Warpgroup matrix multiply, E4M3 x E4M3 into FP32, K = 32 (sm_90a).
// Written by tools/gen_wgmma.py; change that file.
//
// PTX ISA 9.7.15.5 "Asynchronous Multiply-and-Accumulate Instruction: wgmma.mma_async".
// D is 64 x N: register i of thread t holds row 16 (t/32) + (t%32)/4 + 8 ((i>>1)&1) and column
// 8 (i>>2) + 2 (t%4) + (i&1). A comes from shared memory (ss) or from four registers (rs), B always
// from shared memory; both are K-major.
//   fresh_*: D = A B. The old value of D is not read, so nothing depends on it.
//   add_*:   D = A B + D.
//   rs:      D = A B + (keep ? D : 0), keep known at run time.
// NOTE: the call returns at once. Between wgmma_fence() and the wait that ends the group neither D
// nor the registers of A may be touched.
#pragma once

#include <cstdint>

namespace mxattn::ptx {

/// Orders register accesses before the first MMA of a group. PTX ISA 9.7.15.7.1.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;\\n" ::: "memory");
}

/// Closes a group of MMAs. PTX ISA 9.7.15.7.2.
__device__ __forceinline__ void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;\\n" ::: "memory");
}

/// Waits until at most kPending groups are in flight. PTX ISA 9.7.15.7.3.
template <int kPending>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\\n" ::"n"(kPending) : "memory");
}

/// Keeps the compiler from moving uses of an accumulator across the wait before this call.
template <int kCount>
__device__ __forceinline__ void pin(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

/// Keeps the compiler from recomputing a value wherever it is used.
__device__ __forceinline__ std::uint32_t opaque(std::uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}

template <int kN>
struct WgmmaE4m3;
"""


def call(n, form, mode):
    count = n // 2
    registers = [f"%{i}" for i in range(count)]
    lines = []
    name = f"{mode}_{form}" if mode != "keep" else form
    a_parameter = "std::uint64_t a" if form == "ss" else "const std::uint32_t (&a)[4]"
    keep = ", int keep" if mode == "keep" else ""
    accumulator = f"float (&d)[{count}]"
    lines.append(f"  __device__ __forceinline__ static void {name}({accumulator}, {a_parameter},")
    lines.append(f"                                                std::uint64_t b{keep}) {{")
    at = count
    a_text = f"%{at}" if form == "ss" else f"{{%{at}, %{at + 1}, %{at + 2}, %{at + 3}}}"
    at += 1 if form == "ss" else 4
    b_text = f"%{at}"
    at += 1
    if mode == "keep":
        predicate = f"setp.ne.b32 p, %{at}, 0;"
    else:
        predicate = f"setp.ne.b32 p, {0 if mode == 'fresh' else 1}, 0;"
    lines.append("    asm volatile(")
    lines.append('        "{\\n.reg .pred p;\\n' + predicate + '\\n"')
    lines.append(f'        "wgmma.mma_async.sync.aligned.m64n{n}k32.f32.e4m3.e4m3 {{"')
    for i in range(0, count, 16):
        chunk = ", ".join(registers[i : i + 16])
        lines.append(f'        "{chunk}{", " if i + 16 < count else ""}"')
    lines.append(f'        "}}, {a_text}, {b_text}, p, 1, 1;\\n}}\\n"')
    bind = '"=f"' if mode == "fresh" else '"+f"'
    lines.append("        : " + f"{bind}(d[0])" + ("," if count > 1 else ""))
    for i in range(1, count, 6):
        chunk = ", ".join(f"{bind}(d[{j}])" for j in range(i, min(i + 6, count)))
        lines.append(f"          {chunk}{',' if i + 6 < count else ''}")
    inputs = ['"l"(a)'] if form == "ss" else [f'"r"(a[{i}])' for i in range(4)]
    inputs.append('"l"(b)')
    if mode == "keep":
        inputs.append('"r"(keep)')
    lines.append("        : " + ", ".join(inputs) + ");")
    lines.append("  }")
    return "\n".join(lines)


def main():
    print(HEADER)
    print("// clang-format off")
    for n in WIDTHS:
        print(f"\ntemplate <>\nstruct WgmmaE4m3<{n}> {{")
        print(f"  static constexpr int kRegisters = {n // 2};")
        parts = []
        if n in (64, 128):
            parts += [call(n, "ss", "fresh"), call(n, "ss", "add")]
        parts += [call(n, "rs", "fresh"), call(n, "rs", "add")]
        if n in (64, 128):
            parts.append(call(n, "rs", "keep"))
        print("\n".join(parts))
        print("};")
    print("// clang-format on")
    print("\n}  // namespace mxattn::ptx")


if __name__ == "__main__":
    main()
