#include "recipe/roles.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

#include "base/error.h"
#include "recipe/registry.h"

namespace mxattn {
namespace {

TEST(Roles, EveryTensorEntersOneProductOverChannelsAndOneOverItsTokens) {
  for (const Role role : {Role::kQ, Role::kK, Role::kV, Role::kGradient}) {
    int over_channels = 0;
    int over_tokens = 0;
    for (const Product& product : kProducts) {
      const bool left = product.partner == Partner::kTensor and product.left == role;
      if (not left and product.right != role) continue;
      (product.folds() ? over_tokens : over_channels) += 1;
    }
    EXPECT_EQ(over_channels, 1) << int(role);
    EXPECT_EQ(over_tokens, 1) << int(role);
  }
}

TEST(Roles, OnlyQAndKAreRotatedAndOnlyByPowersOfTwo) {
  EXPECT_TRUE(is_rotated(Role::kQ, 128, true));
  EXPECT_TRUE(is_rotated(Role::kK, 64, true));
  EXPECT_FALSE(is_rotated(Role::kK, 96, true));
  EXPECT_FALSE(is_rotated(Role::kK, 128, false));
  EXPECT_FALSE(is_rotated(Role::kV, 128, true));
  EXPECT_FALSE(is_rotated(Role::kGradient, 128, true));
}

// fp8 with one field changed to what cannot work.
template <class Change>
std::string fault_of(Change change) {
  Recipe recipe = recipes::fp8;
  change(recipe);
  const char* text = fault(recipe);
  return text == nullptr ? "" : text;
}

TEST(Roles, FaultsAreFoundAndNamed) {
  EXPECT_EQ(fault_of([](Recipe&) {}), "");
  EXPECT_NE(fault_of([](Recipe& r) { r.probability = Element::kBf16; }).find("different formats"),
            std::string::npos);
  EXPECT_NE(fault_of([](Recipe& r) {
              r.ds_scale = DsScale::kNone;
              r.operand = Element::kBf16;
              r.probability = Element::kBf16;
            }).find("scale group"),
            std::string::npos);
  EXPECT_NE(fault_of([](Recipe& r) { r.scale_group = ScaleGroup::kNone; }).find("scale group"),
            std::string::npos);
  EXPECT_NE(fault_of([](Recipe& r) { r.ds_scale = DsScale::kNone; }).find("dS"), std::string::npos);
  EXPECT_NE(fault_of([](Recipe& r) { r.scale_group = ScaleGroup::kTensor; }).find("g = dO / L"),
            std::string::npos);
  EXPECT_NE(fault_of([](Recipe& r) { r.ds_scale = DsScale::kTensor; }).find("tensor scale"),
            std::string::npos);
  EXPECT_NE(fault_of([](Recipe& r) { r.output = Element::kE4m3; }).find("outputs"),
            std::string::npos);
  EXPECT_NE(fault_of([](Recipe& r) { r.ds_scale = DsScale::kBlock32; }).find("not be causal"),
            std::string::npos);
  EXPECT_NE(fault_of([](Recipe& r) { r.row_sum = RowSum::kWeights; }).find("row sum"),
            std::string::npos);
  EXPECT_NE(fault_of([](Recipe& r) { r.exponent_rule = ExponentRule::kFloor; }).find("saturate"),
            std::string::npos);
}

TEST(Registry, IdsArePositionsAndNamesAreUnique) {
  std::set<std::string_view> names;
  std::uint8_t position = 0;
  for (const RecipeInfo& info : all_recipes()) {
    EXPECT_EQ(info.recipe.id, position++) << info.name;
    EXPECT_GE(info.recipe.version, 1) << info.name;
    EXPECT_TRUE(names.insert(info.name).second) << info.name;
    EXPECT_EQ(&find_recipe(info.name), &info);
    EXPECT_EQ(&info_of(info.recipe), &info);
    EXPECT_EQ(fault(info.recipe), nullptr) << info.name;
  }
  EXPECT_EQ(position, kNumRecipes);
}

TEST(Registry, AnUnknownNameListsTheOnesThereAre) {
  try {
    find_recipe("fp9");
    FAIL() << "no error";
  } catch (const Error& error) {
    const std::string message = error.what();
    EXPECT_NE(message.find("fp9"), std::string::npos) << message;
    for (const RecipeInfo& info : all_recipes()) {
      EXPECT_NE(message.find(info.name), std::string::npos) << message;
    }
  }
}

// A Recipe is a structural type: this is its use as a template argument.
template <Recipe kRecipe>
constexpr bool is_default() {
  return kRecipe == recipes::fp8;
}
static_assert(is_default<recipes::fp8>() and not is_default<recipes::bf16>());

}  // namespace
}  // namespace mxattn
