#include "recipe/registry.h"

#include <string>

#include "base/error.h"
#include "recipe/roles.h"

namespace mxattn {
namespace {

constexpr RecipeInfo kRecipes[] = {
#define MXATTN_RECIPE(name, form, summary, ...) {#name, form, summary, recipes::name},
#include "recipe/registry.inc"
#undef MXATTN_RECIPE
};

#define MXATTN_RECIPE(name, ...) static_assert(fault(recipes::name) == nullptr, #name);
#include "recipe/registry.inc"
#undef MXATTN_RECIPE

}  // namespace

std::span<const RecipeInfo> all_recipes() { return kRecipes; }

const RecipeInfo& find_recipe(std::string_view name) {
  std::string names;
  for (const RecipeInfo& info : kRecipes) {
    if (info.name == name) return info;
    if (not names.empty()) names += ", ";
    names += info.name;
  }
  require(false, "recipe", '"' + std::string(name) + '"', "one of ", names);
  return kRecipes[0];
}

const RecipeInfo& info_of(const Recipe& recipe) {
  MXATTN_CHECK(recipe.id < kNumRecipes, "id ", int{recipe.id});
  return kRecipes[recipe.id];
}

}  // namespace mxattn
