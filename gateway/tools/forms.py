"""How model families write tool calls, each as a reader of their text.

    hermes    <tool_call>{"name": …, "arguments": {…}}</tool_call>      Qwen 2.5 and 3, Hermes
    llama     {"name": …, "parameters": {…}}; {…}   or after <|python_tag|>   Llama 3.x
    mistral   [TOOL_CALLS][{"name": …, "arguments": {…}}, …]
              [TOOL_CALLS]name[ARGS]{…}, [CALL_ID] and [ARGS] being optional
    deepseek  begin-calls (begin-call kind separator name ```json {…} ``` end-call)* end-calls
              begin-calls (begin-call name separator {…} end-call)* end-calls
    object    a call as in hermes, without marks;  list: an array of them
    bare      the arguments alone, of the one tool there is

A call counts from the moment its tool, one that may be called, and the brace of its arguments
are there; everything before that, and everything that fits no form, is text. A closing mark
may be missing: models leave it out.
"""

from collections.abc import Callable, Collection

from gateway.tools.cursor import Cursor, Steps
from text.tool_format import (
    DEEPSEEK_CALL,
    DEEPSEEK_CALL_END,
    DEEPSEEK_CALLS,
    DEEPSEEK_CALLS_END,
    DEEPSEEK_SEP,
    HERMES_CALL,
    HERMES_CALL_END,
    LLAMA_CALL,
    MISTRAL_ARGS,
    MISTRAL_CALL_ID,
    MISTRAL_CALLS,
)

_ARGUMENTS = ("arguments", "parameters")
_OTHERS = ("id", "type")  # of a call, as texts: nobody asks for them

Names = Collection[str]
Form = Callable[[Cursor, Names], Steps[None]]


def hermes(cursor: Cursor, names: Names) -> Steps[None]:
    """Between tags."""
    while (yield from cursor.prose(HERMES_CALL)):
        yield from cursor.space()
        if (yield from _call(cursor, names)):
            yield from cursor.closing(HERMES_CALL_END)


def llama(cursor: Cursor, names: Names) -> Steps[None]:
    """Bare at the very beginning, or after the tag; several with `;` between them."""
    yield from cursor.space()
    yield from _several(cursor, names)
    while (yield from cursor.prose(LLAMA_CALL)):
        yield from cursor.space()
        yield from _several(cursor, names)


def mistral(cursor: Cursor, names: Names) -> Steps[None]:
    """A list of calls, or a name and its arguments."""
    while (yield from cursor.prose(MISTRAL_CALLS)):
        yield from cursor.space()
        if (yield from cursor.literal("[")):
            yield from _items(cursor, names)
        else:
            yield from _named(cursor, names)


def deepseek(cursor: Cursor, names: Names) -> Steps[None]:
    """Each between its own marks, all of them between two more."""
    while marker := (yield from cursor.prose(DEEPSEEK_CALLS, DEEPSEEK_CALL)):
        if marker == DEEPSEEK_CALLS:
            yield from cursor.space()
            if not (yield from cursor.literal(DEEPSEEK_CALL)):
                cursor.give_back()
                continue
        if (yield from _separated(cursor, names)):
            yield from cursor.closing("```")
            yield from cursor.closing(DEEPSEEK_CALL_END)
            yield from cursor.closing(DEEPSEEK_CALLS_END)


def object_(cursor: Cursor, names: Names) -> Steps[None]:
    """One call and no more."""
    yield from cursor.space()
    yield from _call(cursor, names)
    yield from cursor.prose()


def list_(cursor: Cursor, names: Names) -> Steps[None]:
    """An array of calls."""
    yield from cursor.space()
    if (yield from cursor.literal("[")):
        yield from _items(cursor, names)
    yield from cursor.prose()


def bare(cursor: Cursor, names: Names) -> Steps[None]:
    """The arguments of the one tool that may be called."""
    (name,) = names
    yield from cursor.space()
    if (yield from cursor.ahead("{")):
        cursor.call(name)
        yield from cursor.arguments()
    yield from cursor.prose()


def _several(cursor: Cursor, names: Names) -> Steps[None]:
    while (yield from cursor.ahead("{")) and (yield from _call(cursor, names)):
        yield from cursor.closing(";")
        yield from cursor.space()


def _items(cursor: Cursor, names: Names) -> Steps[None]:
    """After the bracket of an array."""
    more = True
    while more:
        yield from cursor.space()
        if not (yield from _call(cursor, names)):
            return
        more = yield from cursor.closing(",")
    yield from cursor.closing("]")


def _named(cursor: Cursor, names: Names) -> Steps[None]:
    """Mistral's newer form."""
    name = yield from cursor.word()
    if (yield from cursor.literal(MISTRAL_CALL_ID)):
        yield from cursor.word()
    yield from cursor.literal(MISTRAL_ARGS)
    yield from _then_arguments(cursor, names, name)


def _separated(cursor: Cursor, names: Names) -> Steps[bool]:
    """DeepSeek's two: the kind of call and its tool, or the tool alone."""
    name = yield from cursor.word()
    if (yield from cursor.literal(DEEPSEEK_SEP)) and not (yield from cursor.ahead("{")):
        name = yield from cursor.word()
        yield from cursor.space()
        yield from cursor.literal("```json")
    return (yield from _then_arguments(cursor, names, name))


def _then_arguments(cursor: Cursor, names: Names, name: str) -> Steps[bool]:
    yield from cursor.space()
    if name in names and (yield from cursor.ahead("{")):
        cursor.call(name)
        return (yield from cursor.arguments())
    cursor.give_back()
    return False


class _Call:
    """A call as an object, as far as it was read."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.held: str | None = None  # arguments that came before the name
        self.told = False


def _call(cursor: Cursor, names: Names) -> Steps[bool]:
    """One call as an object; whether one was told whole. What is none is text."""
    call = _Call()
    if (yield from _members(cursor, names, call)) and (yield from cursor.literal("}")):
        if call.name is not None and not call.told:
            cursor.call(call.name)
            cursor.argue(call.held or "{}")  # a tool without parameters needs no arguments
            call.told = True
        if call.told:
            cursor.pass_over()
    if call.told:
        cursor.read_again()
    else:
        cursor.give_back()
    return call.told


def _members(cursor: Cursor, names: Names, call: _Call) -> Steps[bool]:
    """From the opening brace to where the closing one should be; false: it is no call."""
    more = yield from cursor.literal("{")
    fits = more
    while more and fits:
        yield from cursor.space()
        key = yield from cursor.string()
        yield from cursor.space()
        fits = yield from cursor.literal(":")
        yield from cursor.space()
        fits = fits and (yield from _member(cursor, names, call, key))
        if fits:
            yield from cursor.space()
            more = yield from cursor.literal(",")
    return fits


def _member(cursor: Cursor, names: Names, call: _Call, key: str | None) -> Steps[bool]:
    if key == "name" and call.name is None:
        call.name = yield from cursor.string()
        return call.name in names
    if key in _ARGUMENTS and call.held is None and not call.told:
        if call.name is None:
            call.held = yield from cursor.held_object()
            return call.held is not None
        if (yield from cursor.ahead("{")):
            cursor.call(call.name)
            call.told = yield from cursor.arguments()
        return call.told
    return key in _OTHERS and (yield from cursor.string()) is not None
