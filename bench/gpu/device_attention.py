"""The C ABI over memory of a CUDA device that torch allocates."""

from __future__ import annotations

import ctypes as c

import mxattn_capi as m
import torch


class DeviceAttention(m.Attention):
    """A problem on the current device with state, workspace and, after make_plan, work lists."""

    def __init__(self, q_shape, k_shape, cu_seqlens, **options):
        index = torch.cuda.current_device()
        super().__init__(q_shape, k_shape, cu_seqlens, device=index, **options)
        workspace = c.c_uint64()
        m.check(m.lib.mxattn_workspace_bytes(self._problem, c.byref(workspace)))
        self._workspace = self._bytes(workspace.value)
        self._call.workspace = self._workspace.data_ptr()
        self._call.workspace_bytes = workspace.value
        self._call.stream = torch.cuda.current_stream().cuda_stream
        self._plan = c.c_void_p()
        self._plan_memory = None

    def __del__(self):
        if getattr(self, "_plan", None):
            m.lib.mxattn_plan_destroy(self._plan)
        super().__del__()

    @staticmethod
    def _lengths(cu_seqlens) -> torch.Tensor:
        return torch.tensor(cu_seqlens, dtype=torch.int32, device="cuda")

    @staticmethod
    def _buffer(shape, dtype) -> torch.Tensor:
        buffer = torch.empty(shape, dtype=getattr(torch, dtype.name), device="cuda")
        buffer.view(torch.uint8).fill_(255)  # what a call does not write shows
        return buffer

    @staticmethod
    def _bytes(size: int) -> torch.Tensor:
        return torch.empty(max(1, size), dtype=torch.uint8, device="cuda")

    @property
    def extra_bytes(self) -> int:
        """Workspace and state."""
        return self._workspace.nbytes + sum(buffer.nbytes for buffer in self.state.values())

    def make_plan(self) -> None:
        """Enqueues the building of the work lists, which later calls use."""
        if self._plan_memory is None:
            size = c.c_uint64()
            m.check(m.lib.mxattn_plan_bytes(self._problem, c.byref(size)))
            self._plan_memory = self._bytes(size.value)
        args = m.DevicePlanArgs(
            size=c.sizeof(m.DevicePlanArgs),
            cu_seqlens_q=m.tensor(self.cu_q),
            memory=self._plan_memory.data_ptr(),
            memory_bytes=self._plan_memory.nbytes,
            workspace=self._call.workspace,
            workspace_bytes=self._call.workspace_bytes,
            stream=self._call.stream,
        )
        plan, create = c.c_void_p(), m.lib.mxattn_plan_create_on_device
        m.check(create(self._problem, c.byref(args), c.byref(plan)))
        m.lib.mxattn_plan_destroy(self._plan)
        self._plan = plan
        self._call.plan = plan
