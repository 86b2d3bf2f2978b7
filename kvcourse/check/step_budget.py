"""The last checker of notebook 06: who gets how much of a step."""

from kvcourse.check.framework import compare, exercise


@exercise
def share_budget(answer):
    """share_budget(left, budget): how many tokens of each running text are computed in a step of at most `budget`
    tokens. `left` says how many each has left to compute, in order of arrival: 1 for one that decodes, more for one
    whose prompt is being read. Those that decode come first."""

    def in_turn(order, take=min):
        """Let the texts take in the order that `order(left)` gives, until the budget is used up."""

        def shared(left, budget):
            taken = [0] * len(left)
            for i in order(left):
                taken[i] = take(left[i], budget - sum(taken))
            return taken

        return shared

    def decodes_first(left):
        return sorted(range(len(left)), key=lambda i: left[i] > 1)

    right = in_turn(decodes_first)

    def first_prompt_only(left, budget):
        prompts = [i for i, n in enumerate(left) if n > 1]
        return right([0 if i in prompts[1:] else n for i, n in enumerate(left)], budget)

    def all_decodes(left, budget, least=0):
        """Every decode takes its token, also where the budget is used up; prompts get the rest, `least` or more."""
        room, taken = max(least, budget - left.count(1)), []
        for n in left:
            taken.append(1 if n == 1 else min(n, room))
            room -= taken[-1] if n > 1 else 0
        return taken

    return compare(
        answer,
        right,
        cases=[
            ([30, 20, 1], 64),
            ([40, 70, 1], 64),
            ([300, 1, 1], 64),
            ([1, 20, 500, 1], 128),
            ([1, 200, 30], 64),
            ([1, 1, 1], 8),
            ([40, 40], 64),
            ([1, 1, 1, 30], 2),
            ([10, 1], 512),
        ],
        mistakes={
            "those that decode come first: a reader waits for each of their tokens": in_turn(
                lambda left: range(len(left))
            ),
            "a prompt need not go in whole; it takes what is left of the budget": in_turn(
                decodes_first, lambda wanted, room: wanted if wanted <= room else 0
            ),
            "more than the budget is used: what others have taken is gone": lambda left, budget: [
                min(n, budget) for n in left
            ],
            "the budget is not looked at": lambda left, budget: list(left),
            "all prompts get the same share; the earlier one goes on first": lambda left, budget: _even(left, budget),
            "prompts go in order of arrival, not the shortest first": in_turn(
                lambda left: sorted(range(len(left)), key=lambda i: left[i])
            ),
            "prompts go in order of arrival, the earliest first": in_turn(
                lambda left: sorted(range(len(left)), key=lambda i: (left[i] > 1, -i))
            ),
            "the tokens of those that decode count as well: the prompts get what they leave": lambda left, budget: [
                1 if n == 1 else taken
                for n, taken in zip(left, in_turn(decodes_first)([n * (n > 1) for n in left], budget), strict=True)
            ],
            "only one prompt is read; what is left of the budget goes to the next": first_prompt_only,
            "those that decode count too: when the budget is used up, the others wait": all_decodes,
            "those that decode count too: when the budget is used up, the others wait, and no text gets fewer than 0": (
                lambda left, budget: all_decodes(left, budget, least=-len(left))
            ),
        },
    )


def _even(left: list[int], budget: int) -> list[int]:
    """Decodes first, then the same share for every prompt."""
    decodes, prompts = sum(n == 1 for n in left), sum(n > 1 for n in left)
    share = (budget - decodes) // max(1, prompts)
    return [n if n == 1 else min(n, share) for n in left]
