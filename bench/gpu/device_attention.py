"""The C ABI over memory of a CUDA device that torch allocates."""

from __future__ import annotations

import mxattn_capi as m
import torch


class DeviceAttention(m.Attention):
    """A problem on the current device with state, workspace and, after make_plan, work lists."""

    def __init__(self, q_shape, k_shape, cu_seqlens, **options):
        index = torch.cuda.current_device()
        super().__init__(q_shape, k_shape, cu_seqlens, device=index, **options)
        self._workspace = self._bytes(self.problem.workspace_bytes)
        self._call.workspace = self._workspace.data_ptr()
        self._call.workspace_bytes = self.problem.workspace_bytes
        self._call.stream = torch.cuda.current_stream().cuda_stream
        self._plan = self._plan_memory = None

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
            self._plan_memory = self._bytes(self.problem.plan_bytes)
        self._plan = self.problem.make_device_plan(
            self.cu_q, None, self._plan_memory, self._workspace, self._call.stream
        )
        self._call.plan = self._plan.handle.value
