"""What the guards count does not depend on when it is counted."""

from hypothesis import example, given
from hypothesis import strategies as st

from perdure.contracts.messages import Effect, ToolDescriptor
from perdure.runtime.guards import Guards, Settled, Valued, fingerprint

TOOLS = {"look": Effect.READ, "peek": Effect.READ, "book": Effect.IDEMPOTENT, "act": Effect.WRITE}
VALUED = st.builds(
    lambda tool, place, output: Valued(tool, {"place": place}, TOOLS[tool], output, None, fingerprint),
    st.sampled_from(sorted(TOOLS)),
    st.integers(0, 1),
    st.integers(0, 1),
)
FAILED = st.builds(
    lambda tool, place, unknown: Settled(
        tool, fingerprint(tool, {"place": place}), TOOLS[tool], "failed", "no luck", unknown=unknown
    ),
    st.sampled_from(sorted(TOOLS)),
    st.integers(0, 1),
    st.booleans(),
)


def answers(guards: Guards) -> list[object]:
    """Everything that can be asked of it."""
    found: list[object] = [guards.failures_with(tool, "no luck") for tool in TOOLS]
    for tool, effect in TOOLS.items():
        for place in (0, 1):
            print_of = fingerprint(tool, {"place": place})
            descriptor = ToolDescriptor(tool, "", {}, effect, repeatable=False)
            found += [guards.repeats(print_of, descriptor), guards.outcome_unknown(print_of)]
    return found


def valued(tool: str) -> Valued:
    return Valued(tool, {}, TOOLS[tool], 0, None, fingerprint)


DOUBT = Settled("act", fingerprint("act", {"place": 0}), Effect.WRITE, "failed", "no luck", unknown=True)


@example([DOUBT, valued("look"), valued("act"), valued("book")])
@example([DOUBT, valued("act"), valued("book"), valued("act"), valued("book")])
@given(st.lists(st.one_of(VALUED, VALUED, FAILED, st.just("changed"), st.just("asked")), max_size=25))
def test_a_replayed_call_that_is_counted_late_counts_as_one_that_is_counted_at_once(
    steps: list[Valued | Settled | str],
) -> None:
    """C8: a resumed run is guarded as one that was never stopped."""
    at_once, late = Guards(), Guards()
    for step in steps:
        match step:
            case Valued():
                at_once.settle(step.settled())
                late.replay(step)
            case Settled():
                assert at_once.settle(step) == late.settle(step)
            case "changed":
                at_once.changed()
                late.changed()
            case _:
                assert answers(at_once) == answers(late)
    last = Valued("look", {"place": 0}, Effect.READ, 0, None, fingerprint).settled()
    assert answers(at_once) == answers(late)
    assert at_once.settle(last) == late.settle(last)
