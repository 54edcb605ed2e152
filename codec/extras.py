"""Which optional packages the GPU codecs need, in words for error messages."""

from __future__ import annotations

import torch


def install_hint() -> str:
    """Say what to install so that the GPU codecs work beside the PyTorch that is running."""
    cuda = torch.version.cuda
    if cuda is None:
        return "this PyTorch is built without CUDA; install a CUDA build of it, then tidegate[cu12] or tidegate[cu13]"
    return f"install tidegate[{'cu12' if cuda.startswith('12') else 'cu13'}]"
