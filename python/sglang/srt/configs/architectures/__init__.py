"""How a checkpoint's config is read, one file an architecture.

Owns which architectures are known. Read by the model config, and by the model registry, which must serve the
same names. It must not import torch.
"""

from sglang.srt.configs.architectures import llama, qwen3
from sglang.srt.configs.architectures.decoder import Architecture

#: Class name in a Hugging Face config -> how that config is read.
ARCHITECTURES: dict[str, Architecture] = {
    architecture.name: architecture for architecture in (llama.ARCHITECTURE, qwen3.ARCHITECTURE)
}
