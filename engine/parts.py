"""Find the parts of a state that a caller asks for, in its skeleton, before any tensor is read."""

from __future__ import annotations

import contextlib
import difflib
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from .errors import LoadError
from .paths import join_steps, shown
from .rebuild import INDEX_TAGS, children, tag_of
from .types import JSON

PartPaths = str | Sequence[str] | None

_MAX_SHOWN = 5
_MAX_COMPARED = 10_000


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a stored state.

    Attributes:
        name: What the caller calls it.
        steps: The steps to it in a row, such as `.model["x.y"]`; "" for the whole state.
        node: Its skeleton.
    """

    name: str
    steps: str
    node: JSON


def whole(skeleton: JSON) -> Part:
    """Return the whole state as a part."""
    return Part("state", "", skeleton)


def find_parts(skeleton: JSON, names: Sequence[str]) -> list[Part]:
    """Look parts up by their paths.

    A path is what error messages write, such as `model.layers.0`, `optimizer.state[3].exp_avg` or `model["a.b"]`. Where
    no place has exactly that path, quotes and brackets do not count: `optimizer.state.3` and `model.a.b` do as well, if
    they fit one place only. "state" is the whole state, unless that has such a key.

    Args:
        skeleton: That of the whole state. May be hostile.
        names: The paths.

    Returns:
        One part a path, in their order.

    Raises:
        LoadError: A path leads nowhere, and which do come nearest; or to several places.
    """
    finder = _Finder(skeleton)
    return [finder.find(name) for name in names]


def tensors_in(parts: Iterable[Part]) -> list[int]:
    """Return the indices of all tensors that the parts hold, ascending; also those that arrays and bytes stand in."""
    found: set[int] = set()
    stack = [part.node for part in parts]
    while stack:
        node = stack.pop()
        tag = tag_of(node)
        if isinstance(node, list) and tag in INDEX_TAGS:
            found.update(index for index in node[1:2] if type(index) is int and index >= 0)
            continue
        stack.extend(child for _, child in children(node))
        if isinstance(node, list) and tag == "OrderedDict@":
            stack.extend(node[1:2])
    return sorted(found)


class _Finder:
    """Looks paths up; remembers the steps of every container that it has met."""

    def __init__(self, skeleton: JSON) -> None:
        self._skeleton = skeleton
        self._exact: dict[int, dict[str, list[tuple[str, JSON]]]] = {}
        self._loose: dict[int, dict[str, list[tuple[str, JSON]]]] = {}

    def find(self, name: str) -> Part:
        search = _Search()
        for is_loose, text in itertools.product((False, True), _texts_of(name)):
            found: dict[str, JSON] = {}
            self._collect(self._skeleton, text, "", is_loose, found, search)
            if len(found) == 1:
                ((steps, node),) = found.items()
                return Part(name, steps, node)
            if found:
                places = ", ".join(itertools.islice((join_steps([steps]) for steps in found), _MAX_SHOWN))
                raise LoadError(f"part {shown(name)} could be each of {places}; write which", stage="open", fqn=name)
        raise self._not_found(name, search)

    def _collect(
        self, node: JSON, text: str, steps: str, is_loose: bool, found: dict[str, JSON], search: _Search
    ) -> None:
        """Add every place below `node` that `text` may mean."""
        search.note(text, steps, node)
        if not text:
            found[steps] = node
            return
        if not isinstance(node, (list, dict)) or not search.is_new(node, text, is_loose):
            return
        options = self._options(node, is_loose)
        for end in _ends(text):
            for step, child in options.get(text[:end], ()):
                self._collect(child, text[end:], steps + step, is_loose, found, search)

    def _options(self, node: JSON, is_loose: bool) -> dict[str, list[tuple[str, JSON]]]:
        known = self._loose if is_loose else self._exact
        options = known.get(id(node))
        if options is None:
            options = known[id(node)] = {}
            for step, child in children(node):
                for spelling in _spellings(step) if is_loose else (step,):
                    options.setdefault(spelling, []).append((step, child))
        return options

    def _not_found(self, name: str, search: _Search) -> LoadError:
        steps, node, rest = search.furthest
        where = join_steps([steps])
        below = [step for step, _ in itertools.islice(children(node), _MAX_COMPARED)]
        if not below:
            kind = tag_of(node) or type(node).__name__
            what = "a tensor" if kind == "t" else f"a {kind.removesuffix('@')}"
            text = f"there is no {shown(name)} in the checkpoint: {where} is {what}, which has no parts"
            return LoadError(text, stage="open", fqn=where)
        nearest = _nearest(rest, below)
        names = ", ".join(join_steps([steps + step]) for step in nearest)
        more = f" and {len(below) - len(nearest)} more" if len(below) > len(nearest) else ""
        text = f"there is no {shown(name)} in the checkpoint: {where} has {names}{more}"
        return LoadError(text, stage="open", fqn=where)


class _Search:
    """What one search has seen.

    Attributes:
        furthest: Steps to, and node of, the place that most of the path leads to, and the rest of the path.
    """

    def __init__(self) -> None:
        self.furthest: tuple[str, JSON, str] = ("", None, "")
        self._seen: set[tuple[int, int, bool]] = set()
        self._is_started = False

    def note(self, text: str, steps: str, node: JSON) -> None:
        """Keep a place if it is further than all before."""
        if not self._is_started or len(text) < len(self.furthest[2]):
            self.furthest = (steps, node, text)
            self._is_started = True

    def is_new(self, node: JSON, text: str, is_loose: bool) -> bool:
        """Tell whether this rest of the path is looked up in this container for the first time."""
        key = (id(node), len(text), is_loose)
        is_new = key not in self._seen
        self._seen.add(key)
        return is_new


def _texts_of(name: str) -> Iterator[str]:
    """Yield the steps that a path may stand for; the root is called `state`, and left out before a name."""
    if name.startswith("["):
        yield name
    else:
        yield f".{name}"
    if name == "state" or name.startswith("state["):
        yield name.removeprefix("state")


def _ends(text: str) -> Iterator[int]:
    """Yield where the first step of `text` may end."""
    yield from (at for at in range(1, len(text)) if text[at] in ".[")
    yield len(text)


def _spellings(step: str) -> Iterator[str]:
    """Yield the step as it is, and as a caller may write it who minds no quotes and brackets."""
    yield step
    word = step[1:] if step.startswith(".") else step[1:-1]
    if word.startswith('"'):
        with contextlib.suppress(ValueError):  # it may be part of something else, in a hostile file
            word = json.loads(word)
    for spelling in (f".{word}", f"[{word}]", f'["{word}"]', f"['{word}']"):
        if spelling != step:
            yield spelling


def _nearest(rest: str, steps: Sequence[str]) -> list[str]:
    """Return a few steps, in their order: those that look like the start of `rest`, or the first ones."""
    word = rest[: next(_ends(rest))] if rest else ""
    alike = difflib.get_close_matches(word, steps, _MAX_SHOWN, 0.5)
    chosen = set(list(dict.fromkeys([*alike, *steps]))[:_MAX_SHOWN])
    return [step for step in steps if step in chosen][:_MAX_SHOWN]
