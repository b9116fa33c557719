"""Owns the prompts that a draft is trained on: templates times subjects, coding tasks, a file of questions.

Read by the training command and by the test that holds them against the held-out file. It must not hold a
template or a subject that the held-out prompts use.
"""

from __future__ import annotations

import json
import random
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["chat", "gsm8k"]
KINDS: tuple[Kind, ...] = ("chat", "gsm8k")

TEMPLATES = (
    "Explain {} to a ten year old.",
    "Write a short paragraph about {}.",
    "What are the main advantages of {}?",
    "What are the disadvantages of {}?",
    "Give me five tips about {}.",
    "Tell me an interesting fact about {}.",
    "Write a short story that involves {}.",
    "What is {}?",
    "How does {} work?",
    "Why is {} important?",
    "Summarize the history of {} in a few sentences.",
    "Write a poem about {}.",
    "List three common misunderstandings about {}.",
    "Compare {} with something similar.",
    "How can I learn more about {}?",
    "Write an email to a friend about {}.",
    "What should a beginner know about {}?",
    "Describe {} in one sentence.",
    "Give a step by step guide to {}.",
    "Write a dialogue between two people who talk about {}.",
    "What questions should I ask an expert on {}?",
    "Write a blog post introduction about {}.",
    "What are some examples of {}?",
    "How has {} changed over the last hundred years?",
    "Make a list of words that are related to {}.",
    "Can you help me to understand {}?",
    "What would the world look like without {}?",
    "Write a quiz question with four answers about {}.",
    "Give me a definition of {} and an example.",
    "Write a product description that mentions {}.",
    "How much does {} cost, and what does it depend on?",
    "Who are the most important people in the field of {}?",
    "I am writing a report on {}. How should I begin?",
    "Which skills does one need for {}?",
    "Write a speech of one minute on {}.",
    "What do scientists say about {}?",
    "Please write an outline for a lesson on {}.",
    "Is {} good or bad for people? Explain your answer.",
)

_SUBJECTS = """
photosynthesis; solar energy; the Roman Empire; electric cars; chess; bread baking; climate change;
the human heart; black holes; online shopping; public libraries; gardening; the French Revolution;
meditation; machine learning; the water cycle; jazz music; mountain climbing; personal finance; the
stock market; coffee; time management; the printing press; volcanoes; dogs; cats; horse riding;
space travel; the moon; bicycles; vaccines; recycling; the Olympic Games; football; swimming;
painting; photography; film making; the Silk Road; ancient Egypt; dinosaurs; whales; bees; rain
forests; deserts; rivers; the ocean; earthquakes; weather forecasts; gravity; electricity; magnets;
atoms; evolution; the immune system; sleep; healthy food; vegetarian cooking; exercise; yoga;
stress; friendship; teamwork; leadership; job interviews; public speaking; writing a novel; learning
a language; reading books; mathematics; statistics; geometry; algebra; computer programming;
databases; the internet; social media; video games; smartphones; artificial intelligence; robots; 3D
printing; bridges; skyscrapers; trains; airplanes; ships; city planning; traffic; taxes; elections;
democracy; human rights; the United Nations; money; banks; insurance; small businesses; marketing;
customer service; farming; wheat; rice; chocolate; tea; cheese; wine; winter; summer holidays;
camping; hiking; fishing; birds; butterflies; trees; flowers; museums; theatre; classical music; the
guitar; the piano; dancing; fashion; architecture; wooden furniture; pottery; first aid; the brain;
childhood memories; raising children; school uniforms; homework; university life; moving to a new
city; renting a flat; saving water; wind power; nuclear energy; batteries; plastic; steel; glass;
paper; clocks; calendars; maps; satellites; telescopes; the speed of light; the periodic table;
acids and bases; the human eye; blood pressure; vitamins; allergies; teeth; running a marathon
"""
SUBJECTS = tuple(" ".join(subject.split()) for subject in _SUBJECTS.split(";"))

CODING_TEMPLATES = (
    "Write a Python function that {}.",
    "How do I write a program that {}?",
    "Show me a short example of code that {}, with comments.",
    "Explain step by step how a function that {} works.",
)
CODING_TASKS = (
    "reverses a string",
    "checks whether a number is prime",
    "computes the factorial of a number",
    "finds the largest value in a list",
    "counts the words in a text",
    "sorts a list of names",
    "reads a file line by line",
    "removes duplicates from a list",
    "computes the Fibonacci numbers",
    "checks whether a word is a palindrome",
    "converts Celsius to Fahrenheit",
    "merges two dictionaries",
    "computes the average of a list",
    "finds the common items of two lists",
    "prints a multiplication table",
)

ONE_LINERS = (
    "Hello! How are you today?",
    "What is the capital of France?",
    "Tell me a joke.",
    "What can you do?",
    "Good morning. Please give me a motto for the day.",
    "Translate 'good night' into Spanish.",
    "Who wrote Romeo and Juliet?",
    "How many days are there in a leap year?",
    "Recommend a book for a long train ride.",
    "What should I cook tonight?",
    "Name three planets of the solar system.",
    "Write a birthday greeting for my sister.",
    "I feel tired. What can I do?",
    "What is the difference between a lake and a sea?",
    "How do I tie a tie?",
    "Give me a name for a small dog.",
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the user asks, and which of the two sets it belongs to."""

    kind: Kind
    text: str


def chat_prompts() -> list[Prompt]:
    """Every chat prompt that training may draw, in a fixed order."""
    texts = [template.format(subject) for template in TEMPLATES for subject in SUBJECTS]
    texts += [template.format(task) for template in CODING_TEMPLATES for task in CODING_TASKS]
    return [Prompt("chat", text) for text in [*texts, *ONE_LINERS]]


def read_prompts_file(path: Path) -> list[Prompt]:
    """The questions of a JSONL file: one object with the key "question" a line, as GSM8K has them.

    Raises ValueError with the line's number where a line has none.
    """
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        row = json.loads(line)
        question = row.get("question") if isinstance(row, dict) else None
        if not isinstance(question, str) or not question.strip():
            raise ValueError(
                f'{path}:{number}: each line of --prompts-file is an object with a text under "question", '
                f"got {line[:80]!r}; take GSM8K's training file"
            )
        prompts.append(Prompt("gsm8k", question))
    return prompts


def draw_prompts(
    *, num_chat: int, num_file: int, file: Path | None, held_out: Collection[str], seed: int
) -> list[Prompt]:
    """The prompts of one run: drawn without repetition by `seed`, none of them held out, the kinds mixed.

    Raises ValueError when there are fewer prompts than asked for.
    """
    chosen: list[Prompt] = []
    sources = [("--chat-prompts", num_chat, chat_prompts())]
    if file is not None:
        sources.append(("--file-prompts", num_file, read_prompts_file(file)))
    draw = random.Random(seed)
    for flag, wanted, prompts in sources:
        free = [prompt for prompt in prompts if prompt.text not in held_out]
        if wanted > len(free):
            raise ValueError(f"{flag} is {wanted}, and there are only {len(free)} prompts; ask for fewer")
        chosen += draw.sample(free, wanted)
    draw.shuffle(chosen)
    return chosen
