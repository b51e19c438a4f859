/* The C interface from C: one training call, and an error. Exits with 0 if all is well. */
#include <math.h>
#include <mxattn/mxattn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { kTokens = 6, kHeads = 2, kDim = 16, kElements = kTokens * kHeads * kDim, kMaxState = 16 };

static int failures = 0;

static void expect(int condition, const char* what) {
  if (condition) return;
  ++failures;
  fprintf(stderr, "failed: %s (last error: %s)\n", what, mxattn_last_error());
}

static mxattn_tensor rows(uint16_t* data) {
  mxattn_tensor tensor = {0};
  tensor.data = data;
  tensor.dtype = MXATTN_BF16;
  tensor.rank = 3;
  tensor.shape[0] = kTokens;
  tensor.shape[1] = kHeads;
  tensor.shape[2] = kDim;
  tensor.strides[0] = kHeads * kDim;
  tensor.strides[1] = kDim;
  tensor.strides[2] = 1;
  return tensor;
}

static mxattn_problem* make_problem(void) {
  mxattn_problem_config config;
  mxattn_problem* problem = NULL;
  const char* reason = NULL;
  int32_t can_run = 0;
  mxattn_problem_config_init(&config);
  config.total_q = config.total_k = kTokens;
  config.num_documents = 2;
  config.heads_q = config.heads_k = kHeads;
  config.head_dim = kDim;
  config.causal = 1;
  config.threads = 1;
  expect(mxattn_can_run(&config, &can_run, &reason) == MXATTN_OK && can_run == 1, "can_run");
  expect(reason != NULL && reason[0] == '\0', "no reason against it");
  expect(mxattn_problem_create(&config, &problem) == MXATTN_OK, "problem_create");

  config.head_dim = 1000;
  expect(mxattn_can_run(&config, &can_run, &reason) == MXATTN_OK && can_run == 0, "cannot run");
  expect(strcmp(reason, "head_dim = 1000: expected 1 to 256") == 0, "the reason");
  return problem;
}

static int allocate_state(const mxattn_problem* problem, mxattn_buffer* state) {
  int32_t count = 0;
  int32_t i;
  expect(mxattn_state_count(problem, &count) == MXATTN_OK, "state_count");
  expect(count > 0 && count <= kMaxState, "count");
  for (i = 0; i < count; ++i) {
    mxattn_buffer_info info = {0};
    info.size = sizeof info;
    expect(mxattn_state_at(problem, i, &info) == MXATTN_OK, "state_at");
    state[i].bytes = info.bytes;
    state[i].data = aligned_alloc(64, (size_t)((info.bytes + 63) / 64 * 64));
  }
  return count;
}

int main(void) {
  static uint16_t q[kElements], k[kElements], v[kElements], dout[kElements];
  static uint16_t out[kElements], dq[kElements], dk[kElements], dv[kElements];
  static float lse[kHeads * kTokens];
  static int32_t cu_seqlens[] = {0, 4, kTokens};
  const uint16_t kOne = 0x3F80; /* 1 in BF16 */
  mxattn_buffer state[kMaxState];
  mxattn_forward_args forward;
  mxattn_backward_args backward;
  mxattn_problem* problem = make_problem();
  int32_t count, i;
  if (problem == NULL) return 1;
  count = allocate_state(problem, state);

  for (i = 0; i < kElements; ++i) v[i] = dout[i] = kOne; /* q = k = 0: uniform weights */
  mxattn_forward_args_init(&forward);
  forward.call.cu_seqlens_q.data = cu_seqlens;
  forward.call.cu_seqlens_q.dtype = MXATTN_I32;
  forward.call.cu_seqlens_q.rank = 1;
  forward.call.cu_seqlens_q.shape[0] = 3;
  forward.call.cu_seqlens_q.strides[0] = 1;
  forward.call.state = state;
  forward.call.num_state = count;
  forward.q = rows(q);
  forward.k = rows(k);
  forward.v = rows(v);
  forward.out = rows(out);
  forward.lse.data = lse;
  forward.lse.dtype = MXATTN_F32;
  forward.lse.rank = 2;
  forward.lse.shape[0] = kHeads;
  forward.lse.shape[1] = forward.lse.strides[0] = kTokens;
  forward.lse.strides[1] = 1;
  expect(mxattn_forward(problem, &forward) == MXATTN_OK, "forward");
  for (i = 0; i < kElements; ++i) expect(out[i] == kOne, "V = 1 gives O = 1");
  expect(lse[0] == 0.0f, "one key: log 1");
  expect(fabsf(lse[3] - logf(4.0f)) < 1e-6f, "four keys: log 4");
  expect(lse[4] == 0.0f, "the second document starts afresh");

  mxattn_backward_args_init(&backward);
  backward.call = forward.call;
  backward.out = forward.out;
  backward.lse = forward.lse;
  backward.q = rows(NULL); /* the state holds their codes */
  backward.k = rows(NULL);
  backward.v = rows(NULL);
  backward.dout = rows(dout);
  backward.dq = rows(dq);
  backward.dk = rows(dk);
  backward.dv = rows(dv);
  expect(mxattn_backward(problem, &backward) == MXATTN_OK, "backward");
  for (i = 0; i < kElements; ++i) expect((dq[i] & 0x7FFF) == 0, "equal values: dQ = 0");
  expect(dv[kHeads * kDim * 5] == 0x3F00, "one of two weights: dV = 1/2 at the last token");

  backward.dq.rank = 2;
  expect(mxattn_backward(problem, &backward) == MXATTN_INVALID_ARGUMENT, "a wrong rank");
  expect(strstr(mxattn_last_error(), "dq.rank = 2: expected 3") != NULL, "names it");
  expect(strcmp(mxattn_status_name(MXATTN_INVALID_ARGUMENT), "invalid argument") == 0, "status");

  for (i = 0; i < count; ++i) free(state[i].data);
  mxattn_problem_destroy(problem);
  mxattn_problem_destroy(NULL);
  return failures == 0 ? 0 : 1;
}
