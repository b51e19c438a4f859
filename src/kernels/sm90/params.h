// What the kernels are told, from a call and where its workspace lies.
#pragma once

#include "kernels/device.h"
#include "kernels/sm90/backward.h"
#include "kernels/sm90/forward/config.h"
#include "kernels/sm90/workspace.h"

namespace mxattn::kernels::sm90 {

ForwardParams forward_params(const DeviceProblem& device, const DeviceCall& call,
                             const ForwardArgs& args, const ForwardWorkspace& workspace,
                             const DeviceList& list);

BackwardParams dkv_params(const DeviceProblem& device, const DeviceCall& call,
                          const BackwardArgs& args, const BackwardWorkspace& workspace,
                          const DeviceList& list);

BackwardParams dq_params(const DeviceProblem& device, const DeviceCall& call,
                         const BackwardArgs& args, const BackwardWorkspace& workspace,
                         const DeviceList& list);

}  // namespace mxattn::kernels::sm90
