// Items of work of the fast CPU backend, and the functions that run one: what faithful.cc hands to
// the loops, which are compiled once for each SIMD target (faithful_items.cc).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

#include "kernels/cpu/tile_gemm.h"
#include "kernels/kernel.h"
#include "pack/pack.h"
#include "recipe/recipe.h"
#include "recipe/stages.h"

namespace mxattn::kernels::cpu {

inline constexpr int kTile = stages::kKeyTile;  // rows and columns of a tile of scores
static_assert(kTile == stages::kQueryTile and kTile == 2 * stages::kQueryStep);
inline constexpr int kBlock = 32;    // rows of a tile worked on at once: their scores stay in L1
inline constexpr int kMaxUnits = 2;  // tiles of an item, which share every packed operand
inline constexpr int kMaxDim = 256;

/// Channels of a tile: zeros fill up to the depth of one matrix step.
constexpr int padded_dim(int dim) {
  return (dim + stages::kMmaDepth - 1) / stages::kMmaDepth * stages::kMmaDepth;
}

/// An aligned array without initialisation.
template <class T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(std::size_t count)
      : data_(static_cast<T*>(::operator new(count * sizeof(T), kAlignment))) {}
  T* get() const { return data_.get(); }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(T* p) const { ::operator delete(p, kAlignment); }
  };
  std::unique_ptr<T, Free> data_;
};

/// Scratch of one thread; every pass carves it anew (Carver), nothing is allocated in a loop.
/// `bytes` is the largest need of the passes.
std::size_t scratch_bytes(int dim);

class Gradient;  // faithful_gradient.h

/// One item: `count` positions from `first` of a document and head (of queries, or of keys in the
/// dK/dV pass), at most kMaxUnits tiles.
struct Item {
  const Problem* problem = nullptr;
  const TileGemm* engine = nullptr;
  Document document;
  std::int64_t first_tile = 0;  // query tiles of the documents before this one
  int head = 0;
  int first = 0;
  int count = 0;
};

/// For each item function: scratch is scratch_bytes() long and aligned to 64.
struct ItemFunctions {
  void (*forward)(const Item&, const ForwardArgs&, std::byte* scratch);
  void (*dkv)(const Item&, const BackwardArgs&, const Gradient&, std::byte* scratch);
  void (*dq)(const Item&, const BackwardArgs&, const Gradient&, std::byte* scratch);
};

/// The recipe with every field that does not change the loops set to its default: recipes that
/// share loops share a key.
constexpr Recipe loop_recipe(const Recipe& recipe) {
  Recipe key;
  key.operand = recipe.operand;
  key.probability = recipe.probability;
  key.row_reference = recipe.row_reference;
  key.row_sum = recipe.row_sum;
  key.gradient = recipe.gradient;
  key.ds_scale = recipe.ds_scale;
  return key;
}

/// Functions for the recipe on this CPU; null where the backend cannot run it.
const ItemFunctions* item_functions(const Recipe& recipe);

}  // namespace mxattn::kernels::cpu
