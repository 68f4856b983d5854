"""Reversible patches, scoped interception of attention functions, and head-wise attention."""

from attention_patch.interception import intercept, with_override
from attention_patch.reversible import Patch, wrap
from attention_patch.scope import headwise

__all__ = ["Patch", "headwise", "intercept", "with_override", "wrap"]
