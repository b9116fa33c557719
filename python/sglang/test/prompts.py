"""Owns the twenty texts that tests ask a real model: prose, code, chat, lists, one word.

Read by tests that compare whole answers. It must not hold a text for one test alone.
"""

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived",
    "def fibonacci(n):\n",
    "Water boils at",
    "The three primary colours are",
    "To make a good cup of tea, first",
    "Dear Sir or Madam,\n\nI am writing to",
    "1, 1, 2, 3, 5, 8,",
    "The mitochondria is",
    "<|im_start|>user\nWhat is the capital of Italy?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nWrite a haiku about rain.<|im_end|>\n<|im_start|>assistant\n",
    "SELECT name, age FROM users WHERE",
    "In 1969, two men walked on the",
    "The opposite of hot is",
    "A list of fruits:\n- apple\n- banana\n-",
    "If x + 3 = 7, then x =",
    "My favourite season is autumn because",
    "Der schnelle braune Fuchs",
    "import numpy as np\n\nx =",
    "The",
)
