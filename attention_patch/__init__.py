"""Reversible patches, and scoped interception of attention functions."""

from attention_patch.interception import intercept, with_override
from attention_patch.reversible import Patch, wrap

__all__ = ["Patch", "intercept", "with_override", "wrap"]
