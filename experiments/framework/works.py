"""Whose work the findings are compared with, as Markdown."""

from __future__ import annotations

KVPRESS = (
    "[kvpress](https://github.com/NVIDIA/kvpress) "
    "([Devoto et al., 2025](https://arxiv.org/abs/2510.00636))"
)
ADAKV = "[AdaKV](https://arxiv.org/abs/2407.11550) (Feng et al., 2024)"
DUO_ATTENTION = "[DuoAttention](https://arxiv.org/abs/2410.10819) (Xiao et al., 2024)"
KNORM = "[Knorm](https://arxiv.org/abs/2406.11430) (Devoto et al., 2024)"
KVZIP = "[KVzip](https://arxiv.org/abs/2505.23416) (Kim et al., 2025)"
SNAPKV = "[SnapKV](https://arxiv.org/abs/2404.14469) (Li et al., 2024)"
STREAMING_LLM = "[StreamingLLM](https://arxiv.org/abs/2309.17453) (Xiao et al., 2023)"
