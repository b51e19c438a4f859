/* mxattn/plan.h: the work of a packed microbatch: lists made in advance, and how evenly they
 * spread.
 *
 * A pass is cut into items: some consecutive queries (or keys) of one document and head. An order
 * says how items stand in the list and how workers (thread blocks or threads) take them. Orders
 * never change results.
 */
#ifndef MXATTN_PLAN_H_
#define MXATTN_PLAN_H_

#include <mxattn/mxattn.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- lists made in advance ------------------------------------------------------------------ */

/* The lengths of a pack and the work lists of all passes: made once for a microbatch, and named in
 * mxattn_call.plan by the calls of all its layers, also at the same time. Serves every problem with
 * the backend, mask, heads, head_dim, totals and number of documents of the one it was made for,
 * whatever its recipe. Keeps a copy of the lengths; cu_seqlens of a call may then be without data,
 * and must be the same if they are given. */
typedef struct mxattn_plan mxattn_plan;

/* cu_seqlens_k may be null, or without data: that of the queries. */
MXATTN_API mxattn_status mxattn_plan_create(const mxattn_problem* problem,
                                            const mxattn_tensor* cu_seqlens_q,
                                            const mxattn_tensor* cu_seqlens_k, mxattn_plan** plan);
MXATTN_API void mxattn_plan_destroy(mxattn_plan* plan); /* null is fine */

/* The same for a problem on a CUDA device, where lengths and lists lie in memory of the device. */
typedef struct mxattn_device_plan_args {
  uint64_t size;
  mxattn_tensor cu_seqlens_q; /* of the device, as in mxattn_call */
  mxattn_tensor cu_seqlens_k; /* may be without data: that of the queries */
  void* memory;               /* mxattn_plan_bytes, a multiple of 256 */
  uint64_t memory_bytes;
  void* workspace; /* as in mxattn_call; free again when the stream has passed this call */
  uint64_t workspace_bytes;
  void* stream;
} mxattn_device_plan_args;

MXATTN_API void mxattn_device_plan_args_init(mxattn_device_plan_args* args);

/* Bytes of memory for the lists; 0 on the CPU. Never reads the lengths. */
MXATTN_API mxattn_status mxattn_plan_bytes(const mxattn_problem* problem, uint64_t* bytes);

/* Enqueues the building of the lists on the stream and returns: no host synchronisation, and a
 * captured graph may be replayed with other lengths. Calls that name the plan come later on that
 * stream or wait for it. The caller keeps memory and cu_seqlens until the last of them is done; the
 * handle itself owns neither. */
MXATTN_API mxattn_status mxattn_plan_create_on_device(const mxattn_problem* problem,
                                                      const mxattn_device_plan_args* args,
                                                      mxattn_plan** plan);

/* Reads the lengths and checks them: for debugging on a device, where calls take them as they are.
 * Waits for the stream. cu_seqlens_k may be null. */
MXATTN_API mxattn_status mxattn_check_cu_seqlens(const mxattn_problem* problem,
                                                 const mxattn_tensor* cu_seqlens_q,
                                                 const mxattn_tensor* cu_seqlens_k, void* stream);

/* ---- simulation ------------------------------------------------------------------------------
 * How evenly every order of a list spreads over equal workers. Runs no attention and touches no
 * device. An item costs cost_per_tile for every 128 x 128 tile that the mask lets it visit, plus
 * cost_per_item. */

enum { MXATTN_PASS_FORWARD = 0, MXATTN_PASS_DQ = 1, MXATTN_PASS_DKV = 2 };

typedef struct mxattn_schedule_config {
  uint64_t size;
  const int32_t* cu_seqlens_q; /* num_documents + 1 entries, from 0, never decreasing */
  const int32_t* cu_seqlens_k; /* null: those of the queries */
  int32_t num_documents;
  int32_t heads_q; /* a multiple of heads_k */
  int32_t heads_k;
  int32_t causal; /* the mask, as in mxattn_problem_config */
  int32_t window_left;
  int32_t window_right;
  int32_t pass;            /* MXATTN_PASS_... */
  int32_t tile;            /* 128, 192 or 256 queries; 64 or 128 keys with MXATTN_PASS_DKV */
  int32_t heads_per_group; /* heads worked on together, to keep K and V in a cache. 0: all */
  int32_t workers;
  uint32_t cost_per_tile;
  uint32_t cost_per_item;
} mxattn_schedule_config;

/* Defaults: one head, no mask, the forward in items of 256 queries, cost 1 a tile. */
MXATTN_API void mxattn_schedule_config_init(mxattn_schedule_config* config);

/* Every order of one list, simulated. */
typedef struct mxattn_schedule mxattn_schedule;

MXATTN_API mxattn_status mxattn_schedule_create(const mxattn_schedule_config* config,
                                                mxattn_schedule** schedule);
MXATTN_API void mxattn_schedule_destroy(mxattn_schedule* schedule); /* null is fine */

typedef struct mxattn_schedule_info {
  uint64_t size;
  int64_t num_items;
  uint64_t total_cost;
  uint64_t largest_cost;
  double lower_bound;   /* max(total_cost / workers, largest_cost) */
  double packing_bound; /* a higher one, which knows that items cannot be cut */
  int32_t num_orders;
  int32_t chosen;     /* index of the order to take */
  const char* reason; /* one sentence; lives as long as the schedule */
} mxattn_schedule_info;

MXATTN_API mxattn_status mxattn_schedule_get_info(const mxattn_schedule* schedule,
                                                  mxattn_schedule_info* info);

typedef struct mxattn_order_info {
  uint64_t size;
  const char* name;    /* "input", "long-first", "sorted-round-robin", "serpentine", ... */
  const char* summary; /* how items stand in the list and how workers take them */
  uint64_t makespan;
  double makespan_over_bound; /* over lower_bound; 1 if there is nothing to do */
} mxattn_order_info;

MXATTN_API mxattn_status mxattn_schedule_order_at(const mxattn_schedule* schedule, int32_t index,
                                                  mxattn_order_info* info);

/* `count` positions from `first` of a document and head (keys and key heads with MXATTN_PASS_DKV),
 * who does them and from when to when. */
typedef struct mxattn_scheduled_item {
  int32_t document;
  int32_t head;
  int32_t first;
  int32_t count;
  int32_t worker;
  uint32_t cost;
  uint64_t start;
} mxattn_scheduled_item;

/* Writes the first `capacity` items of an order's list, at most num_items. */
MXATTN_API mxattn_status mxattn_schedule_items(const mxattn_schedule* schedule, int32_t index,
                                               mxattn_scheduled_item* items, int64_t capacity);

#ifdef __cplusplus
}
#endif

#endif /* MXATTN_PLAN_H_ */
