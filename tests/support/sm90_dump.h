// What instances of the Hopper kernels for tests leave in memory: codes of P and dS, and what they
// form by exponentials.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels/sm90/instances.h"
#include "kernels/sm90/params.h"
#include "support/device_array.h"
#include "support/device_attention.h"

namespace mxattn::test {

/// Codes (heads, tokens, keys) and statistics of rows and key tiles, on the host.
struct Dump {
  std::int64_t tokens = 0, keys = 0;
  std::vector<std::uint8_t> h, hs, t, ds_dkv, ds_dq;
  std::vector<float> alpha, maximum, correction;

  std::size_t row(int head, std::int64_t token) const {
    return static_cast<std::size_t>(head * tokens + token);
  }
};

/// Runs the instances with a dump on what the last calls of `device` left.
class Dumper {
 public:
  Dumper(DeviceAttention& device, const AttentionCase& test) : device_(device) {
    const auto& documents = test.pack().documents;
    int longest = 1;
    for (const Document& d : documents) longest = std::max(longest, d.k_len);
    dump_.tokens = test.pack().total_q;
    dump_.keys = (longest + 127) / 128 * 128;
    rows_ = static_cast<std::size_t>(test.spec().heads_q * dump_.tokens);
  }

  template <class Config>
  void forward() {
    namespace sm90 = kernels::sm90;
    const auto keys = static_cast<std::size_t>(dump_.keys);
    DeviceArray<std::uint8_t> h(rows_ * keys), hs(rows_ * keys);
    DeviceArray<float> alpha(rows_ * keys / 128), maximum(rows_ * keys / 128), correction(rows_);
    sm90::Carver carver(device_.workspace);
    const sm90::ForwardWorkspace workspace(carver, device_.device_problem());
    sm90::ForwardParams params =
        sm90::forward_params(device_.device_problem(), device_.device_call(nullptr),
                             device_.forward_args(), workspace, workspace.list);
    params.dump = {.h = h.data(),
                   .hs = hs.data(),
                   .alpha = alpha.data(),
                   .maximum = maximum.data(),
                   .correction = correction.data(),
                   .key_tiles = dump_.keys / 128};
    // The calls before left the lists' ends in them.
    MXATTN_EXPECT_CUDA(cudaMemset(workspace.next_item, 0, sizeof(int)));
    sm90::launch_forward<sm90::WithDump<Config>>(params, device_.device_problem().multiprocessors,
                                                 nullptr);
    MXATTN_EXPECT_CUDA(cudaDeviceSynchronize());
    dump_.h = h.to_host();
    dump_.hs = hs.to_host();
    dump_.alpha = alpha.to_host();
    dump_.maximum = maximum.to_host();
    dump_.correction = correction.to_host();
  }

  void backward() {
    namespace sm90 = kernels::sm90;
    const auto keys = static_cast<std::size_t>(dump_.keys);
    DeviceArray<std::uint8_t> t(rows_ * keys), ds_dkv(rows_ * keys), ds_dq(rows_ * keys);
    sm90::Carver carver(device_.workspace);
    const kernels::DeviceProblem& problem = device_.device_problem();
    const sm90::BackwardWorkspace workspace(carver, problem);
    const sm90::CodeDump dump{
        .t = t.data(), .ds_dkv = ds_dkv.data(), .ds_dq = ds_dq.data(), .keys = dump_.keys};
    const kernels::DeviceCall call = device_.device_call(nullptr);
    const kernels::BackwardArgs args = device_.backward_args();
    sm90::BackwardParams dkv = sm90::dkv_params(problem, call, args, workspace, workspace.dkv_list);
    dkv.dump = dump;
    MXATTN_EXPECT_CUDA(cudaMemset(workspace.cleared.words, 0, 2 * sizeof(int)));
    sm90::launch_backward_dkv<sm90::DkvConfig<128, DsScale::kNorm, true>>(
        dkv, problem.multiprocessors, nullptr);
    sm90::BackwardParams dq = sm90::dq_params(problem, call, args, workspace, workspace.dq_list);
    dq.dump = dump;
    sm90::launch_backward_dq<sm90::DqConfig<128, true, DsScale::kNorm, true>>(
        dq, problem.multiprocessors, nullptr);
    MXATTN_EXPECT_CUDA(cudaDeviceSynchronize());
    dump_.t = t.to_host();
    dump_.ds_dkv = ds_dkv.to_host();
    dump_.ds_dq = ds_dq.to_host();
  }

  const Dump& dump() const { return dump_; }

 private:
  DeviceAttention& device_;
  std::size_t rows_ = 0;
  Dump dump_;
};

}  // namespace mxattn::test
