"""How do I generate with drafts? Name the algorithm; the answers stay the same, and tell what was drafted.

Usage: python examples/speculative_ngram.py [--model-path FOLDER_OR_GGUF_OR_ALIAS]
"""

from __future__ import annotations

import argparse

import sglang as sgl

PROMPT = "Write the numbers from one to twenty.\n1, 2, 3,"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-path", default="smollm2-135m-instruct")
    options = parser.parse_args()

    with sgl.Engine(model_path=options.model_path, speculative_algorithm="NGRAM") as engine:
        sampling = {"temperature": 0, "max_new_tokens": 64}
        for attempt in ("first", "second"):  # n-grams come from what was generated before
            answer = engine.generate(PROMPT, sampling)
            meta = answer["meta_info"]
            print(f"{attempt}: {meta['completion_tokens']} tokens in {meta['spec_verify_ct']} rounds")
        print(PROMPT + answer["text"])


if __name__ == "__main__":
    main()
