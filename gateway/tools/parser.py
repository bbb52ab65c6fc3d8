"""Tool calls out of an answer's text, as it comes.

    >>> parser = CallParser("hermes", ("look",), parallel=True)
    >>> parser.feed('Well. <tool_call>{"name": "look", "arguments": {"at')
    [Said(text='Well.'), Called(index=0, name='look'), Argued(index=0, text='{"at')]
    >>> parser.feed('": 1}}</tool_call>', final=True)
    [Argued(index=0, text='": 1}')]

No character is lost but white space beside calls and what belongs to a call that was told.
Once a call's arguments have begun they cannot be taken back: should they break off, or break
the rules of JSON, the call stays as far as it was told, and the rest is text.
"""

from collections.abc import Collection, Mapping
from typing import Literal

from gateway.tools.cursor import Cursor, Piece
from gateway.tools.forms import Form, bare, deepseek, hermes, list_, llama, mistral, object_

CallForm = Literal["hermes", "llama", "mistral", "deepseek", "object", "list", "bare"]

CALLS_MAX = 128

_FORMS: Mapping[CallForm, Form] = {
    "hermes": hermes,
    "llama": llama,
    "mistral": mistral,
    "deepseek": deepseek,
    "object": object_,
    "list": list_,
    "bare": bare,
}


class CallParser:
    """One choice of an answer. `names` are of the tools that may be called.

    Unless calls may be `parallel`, nothing is told of what follows the first.
    """

    def __init__(self, form: CallForm, names: Collection[str], *, parallel: bool) -> None:
        self._cursor = Cursor(calls_max=CALLS_MAX if parallel else 1)
        self._steps = _FORMS[form](self._cursor, names)
        next(self._steps)  # up to where it first needs text: no form decides without any

    @property
    def called(self) -> bool:
        """Whether a call was told whole."""
        return self._cursor.whole > 0

    def feed(self, text: str, *, final: bool = False) -> list[Piece]:
        """What the text adds; `final` says that nothing follows, and is said once."""
        self._cursor.feed(text, final=final)
        next(self._steps, None)
        return self._cursor.take()
