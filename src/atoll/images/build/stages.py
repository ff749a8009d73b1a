"""The stages of a Dockerfile: where each begins, what it is made from, and which are needed for a target."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from atoll.errors import InvalidArgument
from atoll.images.build.dockerfile import Instruction
from atoll.images.build.variables import words


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage. `base` is an image's name or the number of an earlier stage."""

    number: int
    name: str
    base: str | int
    begin: Instruction
    steps: tuple[Instruction, ...]


def split(instructions: Sequence[Instruction], args: Mapping[str, str]) -> tuple[tuple[Stage, ...], dict[str, str]]:
    """Return the stages, and the arguments declared before the first FROM with their values."""
    declared: dict[str, str] = {}
    stages: list[Stage] = []
    for one in instructions:
        if one.name == "ARG" and not stages:
            declare(one, declared, declared, args)
        elif one.name == "FROM":
            stages.append(_begin(one, stages, declared))
        else:
            last = stages[-1]
            stages[-1] = Stage(last.number, last.name, last.base, last.begin, (*last.steps, one))
    return tuple(stages), declared


def declare(
    one: Instruction, env: Mapping[str, str], into: dict[str, str], given: Mapping[str, str],
    outer: Mapping[str, str] | None = None,
) -> None:  # fmt: skip
    """Enter the arguments that an ARG declares: the caller's value, else its default, else the one before the first FROM."""
    for word in words(one.text, env):
        name, equals, default = word.partition("=")
        if not name.isidentifier():
            raise one.wrong(f"declares {name!r:.80}, which is no name of a variable")
        if name in given:
            into[name] = given[name]
        elif equals:
            into[name] = default
        elif outer is not None and name in outer:
            into[name] = outer[name]


def _begin(one: Instruction, stages: Sequence[Stage], args: Mapping[str, str]) -> Stage:
    found = words(one.text, args)
    if len(found) not in (1, 3) or (len(found) == 3 and found[1].upper() != "AS"):
        raise one.wrong("needs IMAGE or IMAGE AS NAME")
    if not found[0]:
        raise one.wrong("names no image: an argument in it has no value")
    name = found[2].lower() if len(found) == 3 else ""
    if name and (name.isdigit() or any(name == other.name for other in stages)):
        raise one.wrong(f"gives a name that is taken or a number: {name!r:.80}")
    base: str | int = next(
        (other.number for other in stages if other.name and other.name == found[0].lower()), found[0]
    )
    return Stage(len(stages), name, base, one, ())


def find(stages: Sequence[Stage], name: str) -> Stage | None:
    """Return an earlier stage by name or number."""
    if name.isdigit():
        return stages[int(name)] if len(name) < 5 and int(name) < len(stages) else None
    return next((stage for stage in stages if stage.name and stage.name == name.lower()), None)


def needed(stages: Sequence[Stage], target: str) -> tuple[Stage, ...]:
    """Return the stages that the target is made of, in order; the target is last."""
    last = find(stages, target) if target else stages[-1]
    if last is None:
        known = ", ".join(stage.name for stage in stages if stage.name)
        raise InvalidArgument(f"the Dockerfile has no stage {target!r:.80}", hint=f"it has {known}" if known else "")
    wanted: set[int] = set()
    todo = [last]
    while todo:
        stage = todo.pop()
        if stage.number in wanted:
            continue
        wanted.add(stage.number)
        if isinstance(stage.base, int):
            todo.append(stages[stage.base])
        for step in stage.steps:
            if step.name == "COPY" and "from" in step.flags:
                source = find(stages[: stage.number], step.flags["from"])
                todo += [source] if source is not None else []
    return tuple(stage for stage in stages if stage.number in wanted)
