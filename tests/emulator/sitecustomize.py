"""Replaces CUDA's operators by the CPU's at the start of every process with this folder in its path."""

from __future__ import annotations

import ctypes
import os

import torch

torch.cuda.init()
ctypes.PyDLL(os.environ["EMULATED_OPERATORS"]).emulate_operators()
# their kernels have no counterpart on the CPU
torch.backends.cudnn.enabled = False
torch.backends.cuda.enable_flash_sdp(enabled=False)
torch.backends.cuda.enable_mem_efficient_sdp(enabled=False)
torch.backends.cuda.enable_cudnn_sdp(enabled=False)
