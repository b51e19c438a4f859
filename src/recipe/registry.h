// The recipes by name.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>

#include "recipe/recipe.h"

namespace mxattn {

namespace detail {
enum RecipeId : std::uint8_t {
#define MXATTN_RECIPE(name, form, summary, ...) kRecipeId_##name,
#include "recipe/registry.inc"
#undef MXATTN_RECIPE
  kNumRecipes,
};
}  // namespace detail

inline constexpr std::size_t kNumRecipes = detail::kNumRecipes;

/// The recipes as constants, for template arguments: recipes::fp8, recipes::bf16, ...
namespace recipes {
#define MXATTN_RECIPE(name, form, summary, ...) \
  inline constexpr Recipe name{.id = detail::kRecipeId_##name, __VA_ARGS__};
#include "recipe/registry.inc"
#undef MXATTN_RECIPE
}  // namespace recipes

/// All recipes, in the order of their ids.
std::span<const RecipeInfo> all_recipes();

/// The recipe of that name; throws Error (kInvalidArgument) that lists the names there are.
const RecipeInfo& find_recipe(std::string_view name);

/// The registry line of a recipe.
const RecipeInfo& info_of(const Recipe& recipe);

}  // namespace mxattn
