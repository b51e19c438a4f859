/* mxattn: attention in 8 bits, forward and backward, for training. The C interface.
 *
 * Conventions
 *   - Every function that can fail returns a mxattn_status; mxattn_last_error() then tells, for the
 *     calling thread, which argument was wrong, its value and what was expected.
 *   - All arguments are checked before any work: on MXATTN_INVALID_ARGUMENT and MXATTN_UNSUPPORTED
 *     nothing has been written.
 *   - Structs that may grow begin with `size`: set it to sizeof(the struct), most simply by their
 *     _init function, which also sets every default.
 *   - Strings that the library hands out live as long as the library, except where a function says
 *     "until the next call": those belong to the calling thread.
 *   - Handles may be used by several threads at once; the library has no other state.
 *   - A process forked from a thread that has made calls on the CPU makes its own there on one
 *     thread: OpenMP's others do not come along. Results are the same.
 *   - Tensors are the caller's. The library allocates no memory on a device.
 */
#ifndef MXATTN_MXATTN_H_
#define MXATTN_MXATTN_H_

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define MXATTN_API __attribute__((visibility("default")))
#else
#define MXATTN_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Raised when a struct or function changes in a way that old callers would not survive. */
#define MXATTN_ABI_VERSION 1

/* ---- status ------------------------------------------------------------------------------- */

typedef int32_t mxattn_status;
enum {
  MXATTN_OK = 0,
  MXATTN_INVALID_ARGUMENT = 1, /* the caller's input is wrong */
  MXATTN_UNSUPPORTED = 2,      /* the input is legal, but the backend cannot run it */
  MXATTN_OUT_OF_MEMORY = 3,
  MXATTN_CUDA = 4,    /* a CUDA call failed */
  MXATTN_INTERNAL = 5 /* a promise of the library broke: a bug of the library */
};

/* "ok", "invalid argument", ... */
MXATTN_API const char* mxattn_status_name(mxattn_status status);

/* Message of the last call of this thread that failed; "" if none. Until the next call. */
MXATTN_API const char* mxattn_last_error(void);

/* ---- tensors ------------------------------------------------------------------------------ */

enum {
  MXATTN_BF16 = 1,
  MXATTN_F32 = 2,
  MXATTN_E4M3 = 3, /* one byte a code */
  MXATTN_I8 = 4,
  MXATTN_I32 = 5
};

/* "bf16", "f32", ... */
MXATTN_API const char* mxattn_dtype_name(int32_t dtype);

#define MXATTN_MAX_RANK 4

/* A strided view. Strides count elements. data may be null if a dimension is 0. */
typedef struct mxattn_tensor {
  void* data;
  int32_t dtype;
  int32_t rank;
  int64_t shape[MXATTN_MAX_RANK];
  int64_t strides[MXATTN_MAX_RANK];
} mxattn_tensor;

/* ---- the problem -------------------------------------------------------------------------- */

enum { MXATTN_DEVICE_CPU = 0, MXATTN_DEVICE_CUDA = 1 };

/* What is known before the lengths of the documents are. */
typedef struct mxattn_problem_config {
  uint64_t size;
  const char* recipe; /* null: "fp8" */
  const char*
      backend; /* null or "auto": the best that can run it; or a name of mxattn_backend_at */
  int32_t device_kind; /* where all tensors lie */
  int32_t device_index;
  int64_t total_q;       /* rows of q and out: capacity, the last document may end before it */
  int64_t total_k;       /* rows of k and v */
  int32_t num_documents; /* at least 1: entries of cu_seqlens less 1 */
  int32_t heads_q;       /* a multiple of heads_k */
  int32_t heads_k;
  int32_t head_dim; /* 1 to 256 */
  /* With offset = k_len - q_len, query i of a document sees key j if
   *   causal:       j <= i + offset
   *   window_left:  j >= i + offset - window_left      (-1: no bound)
   *   window_right: j <= i + offset + window_right     (-1: no bound) */
  int32_t causal;
  int32_t window_left;
  int32_t window_right;
  int32_t has_softmax_scale; /* 0: 1 / sqrt(head_dim) */
  float softmax_scale;       /* finite, log2(e) times it too */
  int32_t rotate;  /* rotate channels of q and k before quantisation. -1: as the recipe says */
  int32_t threads; /* CPU threads of a call. 0: mxattn_default_threads() */
} mxattn_problem_config;

MXATTN_API void mxattn_problem_config_init(mxattn_problem_config* config);

typedef struct mxattn_problem mxattn_problem;

/* Checks the configuration and chooses the backend. MXATTN_UNSUPPORTED if none can run it. */
MXATTN_API mxattn_status mxattn_problem_create(const mxattn_problem_config* config,
                                               mxattn_problem** problem);
MXATTN_API void mxattn_problem_destroy(mxattn_problem* problem); /* null is fine */

/* Whether mxattn_problem_create would succeed. *reason says why not ("" if it would), also for a
 * configuration that is wrong in itself. Until the next call. reason may be null. */
MXATTN_API mxattn_status mxattn_can_run(const mxattn_problem_config* config, int32_t* can_run,
                                        const char** reason);

/* For people: recipe, backend and why it was chosen, tiles, rotation, instructions, memory.
 * Lives as long as the problem. */
MXATTN_API const char* mxattn_problem_explain(const mxattn_problem* problem);

/* Name of the chosen backend. */
MXATTN_API const char* mxattn_problem_backend(const mxattn_problem* problem);

/* ---- memory ------------------------------------------------------------------------------- */

/* One buffer of the state that the forward leaves to the backward: contiguous, in this order.
 * row_reference and row_sum: (heads_q, total_q). Operands hold each document at a multiple of 16
 * slots: codes (heads, slots, head_dim), exponents and norms (heads, slots). */
typedef struct mxattn_buffer_info {
  uint64_t size;
  const char* name; /* "q_codes", "q_exponents", ..., "row_sum" */
  int32_t dtype;
  int32_t rank;
  int64_t shape[MXATTN_MAX_RANK];
  uint64_t bytes;
  uint64_t alignment; /* of the address, in bytes */
} mxattn_buffer_info;

/* Number of buffers, and what each is. Never reads the lengths of documents. */
MXATTN_API mxattn_status mxattn_state_count(const mxattn_problem* problem, int32_t* count);
MXATTN_API mxattn_status mxattn_state_at(const mxattn_problem* problem, int32_t index,
                                         mxattn_buffer_info* info);

/* Scratch memory on the device of the problem for any one call, at a multiple of 256; 0 on the CPU.
 * Calls that may run at the same time need one each. */
MXATTN_API mxattn_status mxattn_workspace_bytes(const mxattn_problem* problem, uint64_t* bytes);

typedef struct mxattn_buffer {
  void* data;
  uint64_t bytes;
} mxattn_buffer;

/* ---- calls -------------------------------------------------------------------------------- */

/* What every call takes. cu_seqlens: I32, rank 1, num_documents + 1 entries, from 0, never
 * decreasing, the last at most the total. A cu_seqlens_k without data means that of the queries.
 *
 * On a CUDA device every address is the device's, cu_seqlens included. A call enqueues its work on
 * the stream and returns: it neither waits nor allocates, and may be captured into a graph. Lengths
 * are taken as they are (mxattn_check_cu_seqlens of mxattn/plan.h looks at them). */
typedef struct mxattn_call {
  mxattn_tensor cu_seqlens_q;
  mxattn_tensor cu_seqlens_k;
  const mxattn_buffer* state; /* one buffer for each of mxattn_state_count, in that order */
  int32_t num_state;
  int32_t reserved;
  void* workspace;
  uint64_t workspace_bytes;
  void* stream;                   /* a cudaStream_t, null on the CPU */
  const struct mxattn_plan* plan; /* null, or work lists made in advance (mxattn/plan.h) */
} mxattn_call;

/* Bits that name the operands of the state. */
enum { MXATTN_Q = 1, MXATTN_K = 2, MXATTN_V = 4 };

/* q, out: BF16 (total_q, heads_q, head_dim); k, v: BF16 (total_k, heads_k, head_dim); the last
 * dimension contiguous. lse: F32 (heads_q, total_q), contiguous, natural logarithm. Rows outside
 * the documents, and rows that see no key: out 0, lse -inf. Writes every buffer of the state. */
typedef struct mxattn_forward_args {
  uint64_t size;
  mxattn_call call;
  mxattn_tensor q;
  mxattn_tensor k;
  mxattn_tensor v;
  mxattn_tensor out;
  mxattn_tensor lse;
  /* Operands (MXATTN_Q | ...) that mxattn_quantize has put into the state; their tensors may then
   * be without data. 0: the forward quantises all three. */
  int32_t quantized;
  int32_t reserved;
} mxattn_forward_args;

MXATTN_API void mxattn_forward_args_init(mxattn_forward_args* args);
MXATTN_API mxattn_status mxattn_forward(const mxattn_problem* problem,
                                        const mxattn_forward_args* args);

/* Shapes as in the forward; dq as q, dk and dv as k. Reads the state. q, k and v may be without
 * data where the state holds their codes. Rows outside the documents: gradients 0.
 *
 * Where k and v are a part of the keys of a softmax (ring attention), give out over all the keys
 * and state with another row_sum, 2^(log2(e) lse - row_reference) of the LSE over all the keys; lse
 * and the rest of the state stay those of this part's forward. dq is then this part's addend. Not
 * for recipe "exact", which sums D over the keys that it is given. */
typedef struct mxattn_backward_args {
  uint64_t size;
  mxattn_call call;
  mxattn_tensor q;
  mxattn_tensor k;
  mxattn_tensor v;
  mxattn_tensor out;
  mxattn_tensor lse;
  mxattn_tensor dout;
  mxattn_tensor dq;
  mxattn_tensor dk;
  mxattn_tensor dv;
} mxattn_backward_args;

MXATTN_API void mxattn_backward_args_init(mxattn_backward_args* args);
MXATTN_API mxattn_status mxattn_backward(const mxattn_problem* problem,
                                         const mxattn_backward_args* args);

/* Quantises one of q, k, v into its buffers of the state (its other buffers stay as they are). */
typedef struct mxattn_quantize_args {
  uint64_t size;
  mxattn_call call;
  mxattn_tensor tensor; /* BF16, as in the forward */
  int32_t operand;      /* MXATTN_Q, MXATTN_K or MXATTN_V */
  int32_t rotate_back;  /* dequantize: 1 undoes the rotation of q and k; quantize: 0 */
} mxattn_quantize_args;

MXATTN_API void mxattn_quantize_args_init(mxattn_quantize_args* args);
MXATTN_API mxattn_status mxattn_quantize(const mxattn_problem* problem,
                                         const mxattn_quantize_args* args);

/* Writes the restored values, code times scale, of an operand of the state into tensor: F32 of the
 * shape of the operand's tensor. Where the problem rotates, they are values of the rotated tensor
 * unless rotate_back is 1. NaN for tokens that held NaN or Inf; 0 outside the documents. */
MXATTN_API mxattn_status mxattn_dequantize(const mxattn_problem* problem,
                                           const mxattn_quantize_args* args);

/* ---- what there is ------------------------------------------------------------------------ */

MXATTN_API const char* mxattn_version(void);
MXATTN_API int32_t mxattn_default_threads(void);

typedef struct mxattn_recipe_info {
  uint64_t size;
  const char* name;
  const char* form; /* "folded", "literal" or "plain" */
  const char* summary;
  int32_t version; /* changes whenever bits change */
  int32_t control; /* what others do: to be measured, never a default */
  int32_t strictly_causal;
  int32_t quantized;
} mxattn_recipe_info;

MXATTN_API int32_t mxattn_recipe_count(void);
MXATTN_API mxattn_status mxattn_recipe_at(int32_t index, mxattn_recipe_info* info);

typedef struct mxattn_backend_info {
  uint64_t size;
  const char* name;
  const char* summary;
  int32_t device_kind;
  int32_t available;
  const char* reason; /* why it is not available, or "" */
} mxattn_backend_info;

MXATTN_API int32_t mxattn_backend_count(void);
MXATTN_API mxattn_status mxattn_backend_at(int32_t index, mxattn_backend_info* info);

/* SIMD targets that this build holds and this CPU runs, best first, separated by commas. */
MXATTN_API const char* mxattn_simd_targets(void);
/* What multiplies matrices on this CPU, such as "AVX-512 BF16 dot product". */
MXATTN_API const char* mxattn_matrix_engine(void);

/* CUDA devices that this build can use. */
MXATTN_API int32_t mxattn_device_count(void);
MXATTN_API mxattn_status mxattn_device_name(int32_t index, const char** name);

#ifdef __cplusplus
}
#endif

#endif /* MXATTN_MXATTN_H_ */
