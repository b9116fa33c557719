"""How do I chat with a running server? With the openai client, after `make serve`.

Usage: python examples/chat_client.py [QUESTION] [--base-url URL]. Needs `pip install openai`.
"""

from __future__ import annotations

import argparse

import openai


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("question", nargs="?", default="What is the capital of France?")
    parser.add_argument("--base-url", default="http://127.0.0.1:30000/v1")
    options = parser.parse_args()

    client = openai.OpenAI(base_url=options.base_url, api_key="none")
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": options.question}],
        temperature=0,
        max_tokens=128,
        stream=True,
    )
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            print(chunk.choices[0].delta.content, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
