"""Echo: twelve sentences to repeat word for word, the best case for methods that copy from their context.

mtbench run --suite echo
"""

from collections.abc import Mapping

from mtbench import SUITES, Prompt, Source, Suite, Template, UserError

SENTENCES = (
    "The lamp in the hall burns all night because nobody remembers to turn it off.",
    "A small boat with a red sail left the harbour before the fog came in.",
    "Seven crows sat on the fence and watched the farmer mend his gate.",
    "She kept every letter in a tin box under the third stair.",
    "When the bell rang twice, the children ran down to the river.",
    "The old clock is four minutes slow on Mondays and nobody knows why.",
    "He planted beans along the wall and sunflowers behind the shed.",
    "The train to the coast leaves at nine and stops in every village.",
    "Under the bridge the water was so clear that you could count the stones.",
    "Our neighbour paints her door a different colour each spring.",
    "The bread was still warm when the baker opened his shop.",
    "Two dogs slept in the sun while the cat watched them from the roof.",
)


@SUITES.register("echo")
class Echo(Suite):
    max_new_tokens = 64
    metric = "exact_match"

    def __init__(self, variant: str, source: Source) -> None:
        if variant:
            raise UserError(f"suite 'echo' has no variants, so {variant!r} is not allowed behind the colon")
        self.task = {"name": "echo", "num_fewshot": 0, "chat_template": True, "filter": "stripped"}

    def prompts(self, template: Template, limit: int | None) -> list[Prompt]:
        return [
            Prompt(
                item=f"echo/{number}/0",
                text=template([{"role": "user", "content": f"Repeat word for word, and say nothing else: {sentence}"}]),
            )
            for number, sentence in enumerate(SENTENCES[:limit])
        ]

    def score(self, answers: Mapping[str, str]) -> dict[str, float]:
        """Score 1 if the answer is the sentence, else 0."""
        return {item: float(text.strip() == SENTENCES[int(item.split("/")[1])]) for item, text in answers.items()}
