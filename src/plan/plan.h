// Problem -> Plan: which items of work there are, and who takes which when. Pure functions on plain
// data: no I/O, no clock, no thread count of the machine, the same list for the same input.
//
// NOTE: a plan orders work; it never changes a result. Every kernel computes an item alike, whoever
// takes it and whenever, so any order gives the same bits.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "pack/pack.h"
#include "plan/cost.h"
#include "recipe/recipe.h"

namespace mxattn::plan {

/// The order of the list and how workers take from it.
enum class Order : std::uint8_t {
  kInput,             // head, document, first ascending; dealt out in turn
  kLongFirst,         // head, document, then cost descending inside the document; dynamic
  kSortedRoundRobin,  // sorted; dealt out in turn
  kSerpentine,        // sorted; dealt out in turn, every second round backwards
  kSortedDynamic,     // sorted; dynamic
};
inline constexpr Order kAllOrders[] = {Order::kInput, Order::kLongFirst, Order::kSortedRoundRobin,
                                       Order::kSerpentine, Order::kSortedDynamic};

/// How worker w of M takes items of the list.
enum class Assignment : std::uint8_t {
  kRoundRobin,  // items w, w + M, w + 2 M, ...
  kSerpentine,  // round r: item r M + w if r is even, r M + (M - 1 - w) if odd
  kDynamic,     // a free worker takes the next item (one atomic counter)
};

const char* name_of(Order order);
const char* name_of(Pass pass);
Assignment assignment_of(Order order);

/// Worker of item `index` among `workers` for the two static assignments.
MXATTN_HOST_DEVICE constexpr std::int64_t static_worker(Assignment assignment, std::int64_t index,
                                                        std::int64_t workers) {
  const std::int64_t round = index / workers;
  const std::int64_t place = index % workers;
  return assignment == Assignment::kSerpentine and round % 2 == 1 ? workers - 1 - place : place;
}

/// What to plan besides the pack and the mask.
struct PlanSpec {
  Pass pass = Pass::kForward;
  int heads_q = 1;
  int heads_k = 1;  // divides heads_q
  int tile = 256;   // positions of an item: 128, 192 or 256 queries; 64, 128 or 256 keys (kDkv)
  Order order = Order::kSortedDynamic;
  // Heads (of the pass: query heads, or key heads with kDkv) that are worked on together so that
  // what they read stays in L2; 0: all (HeadGroups). The groups follow one another and each is
  // sorted by itself, so the 4/3 bound of the sorted dynamic order holds inside a group only.
  int heads_per_group = 0;
  CostModel cost = {};
  KeyOrder key_order = KeyOrder::kDescending;  // the recipe's: how an item walks its key tiles

  constexpr bool operator==(const PlanSpec&) const = default;
};

/// A list of work. Every (document, head, position) is in exactly one item, also positions that see
/// nothing: their outputs are zeros that somebody must write. Rows outside documents are in none.
struct Plan {
  PlanSpec spec;
  Mask mask;
  std::vector<WorkItem> items;
  std::vector<std::uint32_t> costs;  // of each item

  bool operator==(const Plan&) const = default;
};

/// The lists of all passes of one pack and mask, each with the tile of the backend that asked for
/// them. Made once for a microbatch and read by all its layers.
struct Plans {
  Plan forward, dq, dkv;

  const Plan& of(Pass pass) const {
    return pass == Pass::kForward ? forward : pass == Pass::kDq ? dq : dkv;
  }
};

/// Heads of the pass.
constexpr int heads_of(const PlanSpec& spec) {
  return spec.pass == Pass::kDkv ? spec.heads_k : spec.heads_q;
}

/// Throws Error (kInvalidArgument) naming the field unless the spec is legal.
void check_spec(const PlanSpec& spec);

/// Number of items of the plan, without building it.
std::int64_t count_items(const Pack& pack, const PlanSpec& spec);

Plan make_plan(const Pack& pack, const Mask& mask, const PlanSpec& spec);

/// Largest group of heads whose operands fit into `l2_bytes`: at least one key head, a whole number
/// of them, counted in heads of the pass. `bytes_per_key_head`: what the items of one key head read
/// over and over, such as K and V.
int heads_per_group_for_l2(const PlanSpec& spec, std::int64_t bytes_per_key_head,
                           std::int64_t l2_bytes);

/// One line of head, then at most `max_items` lines of items: for logs and error reports.
std::string to_string(const Plan& plan, std::size_t max_items = 16);

}  // namespace mxattn::plan
