"""How do I generate text without a server? The engine starts its own processes and ends them with the block.

Usage: python examples/offline_generate.py [--model-path FOLDER_OR_GGUF_OR_ALIAS]
"""

from __future__ import annotations

import argparse

import sglang as sgl

PROMPTS = ["The capital of France is", "Water boils at", "The three primary colours are"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-path", default="smollm2-135m-instruct")
    options = parser.parse_args()

    with sgl.Engine(model_path=options.model_path) as engine:
        sampling = {"temperature": 0, "max_new_tokens": 24}
        for prompt, answer in zip(PROMPTS, engine.generate(PROMPTS, sampling), strict=True):
            print(f"{prompt!r} -> {answer['text']!r}")

        print("streamed: ", end="")
        seen = 0
        for chunk in engine.generate("Once upon a time", sampling, stream=True):
            print(chunk["text"][seen:], end="", flush=True)  # each chunk carries the whole text so far
            seen = len(chunk["text"])
        print()


if __name__ == "__main__":
    main()
