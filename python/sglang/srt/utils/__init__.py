"""Small tools without an opinion; one noun a module.

Read by any floor except the context and what it imports. Must not import upwards.
"""

from sglang.srt.platforms import is_cuda

__all__ = ["is_cuda"]
