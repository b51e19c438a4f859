#include "kernels/cpu/faithful_items.h"

#include <algorithm>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/faithful_items.cc"
#include "hwy/foreach_target.h"  // NOLINT: re-includes this file for every target
#include "kernels/cpu/faithful_dkv-inl.h"
#include "kernels/cpu/faithful_dq-inl.h"
#include "kernels/cpu/faithful_forward-inl.h"

HWY_BEFORE_NAMESPACE();
namespace mxattn::kernels::cpu {
namespace HWY_NAMESPACE {

template <Recipe kRecipe>
constexpr ItemFunctions functions_of() {
  return {
      .forward = [](const Item& item, const ForwardArgs& args,
                    std::byte* scratch) { Forward<kRecipe>(item, args, scratch).run(); },
      .dkv = [](const Item& item, const BackwardArgs& args, const Gradient& gradient,
                std::byte* scratch) { DkvPass<kRecipe>(item, args, gradient, scratch).run(); },
      .dq = [](const Item& item, const BackwardArgs& args, const Gradient& gradient,
               std::byte* scratch) { DqPass<kRecipe>(item, args, gradient, scratch).run(); },
  };
}

const ItemFunctions* find_functions(const Recipe& recipe) {
  static constexpr Recipe kFp8{};
  static constexpr Recipe kDsRow{.ds_scale = DsScale::kRow};
  static constexpr Recipe kIntegerRef{.row_reference = RowReference::kInteger,
                                      .row_sum = RowSum::kWeights};
  static constexpr Recipe kBf16{.operand = Element::kBf16,
                                .probability = Element::kBf16,
                                .gradient = GradientOperand::kPlain,
                                .ds_scale = DsScale::kNone};
  static constexpr ItemFunctions kFunctions[] = {functions_of<kFp8>(), functions_of<kDsRow>(),
                                                 functions_of<kIntegerRef>(),
                                                 functions_of<kBf16>()};
  constexpr Recipe kRecipes[] = {kFp8, kDsRow, kIntegerRef, kBf16};
  for (int i = 0; i < 4; ++i) {
    if (recipe == kRecipes[i]) return &kFunctions[i];
  }
  return nullptr;
}

std::size_t measure_scratch(int padded) {
  Carver forward(nullptr), dkv(nullptr), dq(nullptr);
  ForwardScratch(forward, padded);
  DkvScratch(dkv, padded);
  DqScratch(dq, padded);
  return static_cast<std::size_t>(std::max({forward.bytes(), dkv.bytes(), dq.bytes()}));
}

}  // namespace HWY_NAMESPACE
}  // namespace mxattn::kernels::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace mxattn::kernels::cpu {

HWY_EXPORT(find_functions);
HWY_EXPORT(measure_scratch);

const ItemFunctions* item_functions(const Recipe& recipe) {
  return HWY_DYNAMIC_DISPATCH(find_functions)(loop_recipe(recipe));
}

std::size_t scratch_bytes(int dim) {
  return HWY_DYNAMIC_DISPATCH(measure_scratch)(padded_dim(dim));
}

}  // namespace mxattn::kernels::cpu
#endif  // HWY_ONCE
