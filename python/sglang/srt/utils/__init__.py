"""Small tools, one noun a module.

Used by any floor except the context and what it imports. Must not import upwards.
"""

from sglang.srt.platforms import is_cuda

__all__ = ["is_cuda"]
