"""Chat with a model behind any OpenAI-compatible endpoint, such as `rllm serve`. An unmodified `openai` client, nothing of rllm.

    python examples/chat_client.py --base-url http://127.0.0.1:8000/v1 "Using the numbers [3, 5, 7], make 26."

Without a question it chats until an empty line or the end of input.
"""

from __future__ import annotations

import argparse
import sys

import openai
from openai.types.chat import ChatCompletionMessageParam


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Chat with an OpenAI-compatible endpoint.")
    parser.add_argument("question", nargs="?", help="ask this and end; without it, chat")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", help="default: the first that the endpoint lists")
    parser.add_argument("--temperature", type=float, help="default: the endpoint's")
    parser.add_argument("--max-tokens", type=int, help="default: the endpoint's")
    return parser.parse_args()


def answer(
    client: openai.OpenAI, model: str, history: list[ChatCompletionMessageParam], args: argparse.Namespace
) -> str:
    """Print the answer as it comes, and return it."""
    parts: list[str] = []
    stream = client.chat.completions.create(
        model=model,
        messages=history,
        stream=True,
        temperature=openai.omit if args.temperature is None else args.temperature,
        max_tokens=openai.omit if args.max_tokens is None else args.max_tokens,
    )
    for chunk in stream:
        text = chunk.choices[0].delta.content or "" if chunk.choices else ""
        parts.append(text)
        print(text, end="", flush=True)
    print()
    return "".join(parts)


def chat(client: openai.OpenAI, model: str, args: argparse.Namespace) -> None:
    history: list[ChatCompletionMessageParam] = []
    while question := input(f"you ({model} listens; empty line ends)> "):
        history.append({"role": "user", "content": question})
        history.append({"role": "assistant", "content": answer(client, model, history, args)})


def main() -> None:
    args = parse_args()
    client = openai.OpenAI(base_url=args.base_url, api_key="unused", max_retries=0)
    try:
        model = args.model or client.models.list().data[0].id
        if args.question:
            answer(client, model, [{"role": "user", "content": args.question}], args)
        else:
            chat(client, model, args)
    except openai.APIConnectionError:
        sys.exit(f"error: nothing answers at {args.base_url}; start it with `rllm serve`, or give --base-url")
    except openai.APIStatusError as error:
        sys.exit(f"error: {error.message}")
    except (EOFError, KeyboardInterrupt):
        print()


if __name__ == "__main__":
    main()
