// Marks for code that the host and a CUDA device share.
#pragma once

#if defined(__CUDACC__)
#define MXATTN_HOST_DEVICE __host__ __device__
#else
#define MXATTN_HOST_DEVICE
#endif
