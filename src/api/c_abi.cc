// The C interface of mxattn/mxattn.h over the rest of the room.
#include <mxattn/mxattn.h>

#include <algorithm>
#include <iterator>
#include <string>

#include "api/abi.h"
#include "api/backends.h"
#include "api/calls.h"
#include "api/devices.h"
#include "api/dtype.h"
#include "api/machine.h"
#include "api/problem.h"
#include "api/work_lists.h"
#include "base/error.h"
#include "recipe/registry.h"

struct mxattn_problem {
  mxattn::api::Problem problem;
};

namespace {
thread_local std::string t_reason;  // of mxattn_can_run
}  // namespace

extern "C" {

using namespace mxattn::api;
using mxattn::Error;
using mxattn::require;
using mxattn::Status;

const char* mxattn_status_name(mxattn_status status) {
  switch (status) {
    case MXATTN_OK:
      return "ok";
    case MXATTN_INVALID_ARGUMENT:
      return "invalid argument";
    case MXATTN_UNSUPPORTED:
      return "unsupported";
    case MXATTN_OUT_OF_MEMORY:
      return "out of memory";
    case MXATTN_CUDA:
      return "CUDA error";
    case MXATTN_INTERNAL:
      return "internal error";
    default:
      return "unknown status";
  }
}

const char* mxattn_dtype_name(int32_t dtype) { return mxattn::api::dtype_name(dtype); }

// ---- the problem -----------------------------------------------------------------------------

void mxattn_problem_config_init(mxattn_problem_config* config) {
  init_struct(config);
  if (config == nullptr) return;
  config->window_left = -1;
  config->window_right = -1;
  config->rotate = -1;
}

mxattn_status mxattn_problem_create(const mxattn_problem_config* config, mxattn_problem** problem) {
  return guarded([&] {
    require(problem != nullptr, "problem", "null", "an address");
    *problem = nullptr;
    *problem = new mxattn_problem{mxattn::api::make_problem(read_struct("config", config))};
  });
}

void mxattn_problem_destroy(mxattn_problem* problem) { delete problem; }

mxattn_status mxattn_can_run(const mxattn_problem_config* config, int32_t* can_run,
                             const char** reason) {
  return guarded([&] {
    require(can_run != nullptr, "can_run", "null", "an address");
    t_reason.clear();
    try {
      mxattn::api::make_problem(read_struct("config", config));
    } catch (const Error& error) {
      if (error.status() != Status::kInvalidArgument and error.status() != Status::kUnsupported) {
        throw;
      }
      t_reason = error.what();
    }
    *can_run = t_reason.empty() ? 1 : 0;
    if (reason != nullptr) *reason = t_reason.c_str();
  });
}

const char* mxattn_problem_explain(const mxattn_problem* problem) {
  return problem == nullptr ? "" : problem->problem.explanation.c_str();
}

const char* mxattn_problem_backend(const mxattn_problem* problem) {
  return problem == nullptr ? "" : problem->problem.backend.entry->name;
}

// ---- work lists ------------------------------------------------------------------------------

mxattn_status mxattn_plan_create(const mxattn_problem* problem, const mxattn_tensor* cu_seqlens_q,
                                 const mxattn_tensor* cu_seqlens_k, mxattn_plan** plan) {
  return guarded([&] {
    require(plan != nullptr, "plan", "null", "an address");
    *plan = nullptr;
    *plan = new mxattn_plan{
        make_work_lists(deref("problem", problem).problem, deref("cu_seqlens_q", cu_seqlens_q),
                        cu_seqlens_k == nullptr ? mxattn_tensor{} : *cu_seqlens_k)};
  });
}

mxattn_status mxattn_plan_bytes(const mxattn_problem* problem, uint64_t* bytes) {
  return guarded([&] {
    write("bytes", bytes, mxattn::api::device_lists_bytes(deref("problem", problem).problem));
  });
}

void mxattn_device_plan_args_init(mxattn_device_plan_args* args) { init_struct(args); }

mxattn_status mxattn_plan_create_on_device(const mxattn_problem* problem,
                                           const mxattn_device_plan_args* args,
                                           mxattn_plan** plan) {
  return guarded([&] {
    require(plan != nullptr, "plan", "null", "an address");
    *plan = nullptr;
    *plan = new mxattn_plan{mxattn::api::make_device_lists(deref("problem", problem).problem,
                                                           read_struct("args", args))};
  });
}

mxattn_status mxattn_check_cu_seqlens(const mxattn_problem* problem,
                                      const mxattn_tensor* cu_seqlens_q,
                                      const mxattn_tensor* cu_seqlens_k, void* stream) {
  return guarded([&] {
    mxattn::api::check_lengths_of(
        deref("problem", problem).problem, deref("cu_seqlens_q", cu_seqlens_q),
        cu_seqlens_k == nullptr ? mxattn_tensor{} : *cu_seqlens_k, stream);
  });
}

void mxattn_plan_destroy(mxattn_plan* plan) { delete plan; }

// ---- memory ----------------------------------------------------------------------------------

mxattn_status mxattn_state_count(const mxattn_problem* problem, int32_t* count) {
  return guarded([&] {
    write("count", count, static_cast<int32_t>(deref("problem", problem).problem.state.size()));
  });
}

mxattn_status mxattn_state_at(const mxattn_problem* problem, int32_t index,
                              mxattn_buffer_info* info) {
  return guarded([&] {
    const auto& state = deref("problem", problem).problem.state;
    require(index >= 0 and index < static_cast<int32_t>(state.size()), "index", index,
            "0 to less than ", state.size());
    const auto& buffer = state[static_cast<std::size_t>(index)];
    mxattn_buffer_info result{.size = 0,
                              .name = buffer.name,
                              .dtype = buffer.dtype,
                              .rank = buffer.rank,
                              .shape = {},
                              .bytes = buffer.bytes,
                              .alignment = mxattn::api::kStateAlignment};
    std::copy(std::begin(buffer.shape), std::end(buffer.shape), result.shape);
    write_struct("info", info, result);
  });
}

mxattn_status mxattn_workspace_bytes(const mxattn_problem* problem, uint64_t* bytes) {
  return guarded(
      [&] { write("bytes", bytes, deref("problem", problem).problem.workspace_bytes()); });
}

// ---- calls -----------------------------------------------------------------------------------

void mxattn_forward_args_init(mxattn_forward_args* args) { init_struct(args); }
void mxattn_backward_args_init(mxattn_backward_args* args) { init_struct(args); }
void mxattn_quantize_args_init(mxattn_quantize_args* args) { init_struct(args); }

mxattn_status mxattn_forward(const mxattn_problem* problem, const mxattn_forward_args* args) {
  return guarded(
      [&] { mxattn::api::forward(deref("problem", problem).problem, read_struct("args", args)); });
}

mxattn_status mxattn_backward(const mxattn_problem* problem, const mxattn_backward_args* args) {
  return guarded(
      [&] { mxattn::api::backward(deref("problem", problem).problem, read_struct("args", args)); });
}

mxattn_status mxattn_quantize(const mxattn_problem* problem, const mxattn_quantize_args* args) {
  return guarded([&] {
    mxattn::api::quantize_operand(deref("problem", problem).problem, read_struct("args", args));
  });
}

mxattn_status mxattn_dequantize(const mxattn_problem* problem, const mxattn_quantize_args* args) {
  return guarded([&] {
    mxattn::api::dequantize_operand(deref("problem", problem).problem, read_struct("args", args));
  });
}

// ---- what there is ---------------------------------------------------------------------------

const char* mxattn_version(void) { return MXATTN_VERSION; }

int32_t mxattn_default_threads(void) { return mxattn::api::default_threads(); }

int32_t mxattn_recipe_count(void) { return static_cast<int32_t>(mxattn::kNumRecipes); }

mxattn_status mxattn_recipe_at(int32_t index, mxattn_recipe_info* info) {
  return guarded([&] {
    require(index >= 0 and index < mxattn_recipe_count(), "index", index, "0 to less than ",
            mxattn_recipe_count());
    const mxattn::RecipeInfo& line = mxattn::all_recipes()[static_cast<std::size_t>(index)];
    // The registry's strings are literals, so their data() ends in 0.
    write_struct("info", info,
                 mxattn_recipe_info{.size = 0,
                                    .name = line.name.data(),
                                    .form = line.form.data(),
                                    .summary = line.summary.data(),
                                    .version = line.recipe.version,
                                    .control = line.recipe.control,
                                    .strictly_causal = line.recipe.strictly_causal(),
                                    .quantized = line.recipe.quantised()});
  });
}

int32_t mxattn_backend_count(void) {
  return static_cast<int32_t>(mxattn::api::all_backends().size());
}

mxattn_status mxattn_backend_at(int32_t index, mxattn_backend_info* info) {
  return guarded([&] {
    require(index >= 0 and index < mxattn_backend_count(), "index", index, "0 to less than ",
            mxattn_backend_count());
    const auto& entry = mxattn::api::all_backends()[static_cast<std::size_t>(index)];
    write_struct("info", info,
                 mxattn_backend_info{.size = 0,
                                     .name = entry.name,
                                     .summary = entry.summary,
                                     .device_kind = entry.device_kind,
                                     .available = *entry.missing() == 0,
                                     .reason = entry.missing()});
  });
}

const char* mxattn_simd_targets(void) { return mxattn::api::simd_targets(); }
const char* mxattn_matrix_engine(void) { return mxattn::api::matrix_engine(); }

int32_t mxattn_device_count(void) {
  try {
    return static_cast<int32_t>(mxattn::api::devices().list.size());
  } catch (...) {  // a driver that fails
    return 0;
  }
}

mxattn_status mxattn_device_name(int32_t index, const char** name) {
  return guarded([&] {
    require(name != nullptr, "name", "null", "an address");
    require(index >= 0 and index < mxattn_device_count(), "index", index,
            "0 to less than mxattn_device_count() = ", mxattn_device_count());
    *name = mxattn::api::devices().list[static_cast<std::size_t>(index)].name.c_str();
  });
}

}  // extern "C"
