"""Every error a user can meet, in one tree.

    IgnisError
    ├── UsageError            the caller asked for something that makes no sense
    │   └── PromptTooLongError
    ├── ModelFileError        a GGUF file that cannot be believed
    │   └── UnsupportedModelError   a sound file of a kind that Ignis cannot run
    ├── TokenizerError        vocabulary, special token or chat template trouble
    ├── GraphError            malformed IR: verifier, parser, type inference, plan
    ├── KernelError           a kernel that cannot be traced, compiled or loaded
    ├── NumericsError         NaN or infinity where a number must stand
    ├── DownloadError         a model that could not be fetched
    └── WriteError            a model file that could not be written

`assert` is for our own bugs; everything else is one of these, and prints as one line.
"""

from __future__ import annotations


class IgnisError(Exception):
    """One clear sentence: what, where, got, wanted, and what to do next.

    The parts are joined into one line, so `str(error)` is what the command line prints.
    """

    def __init__(
        self,
        what: str,
        *,
        where: object = None,
        got: object = None,
        wanted: object = None,
        hint: str | None = None,
    ) -> None:
        self.what, self.where, self.got, self.wanted, self.hint = what, where, got, wanted, hint
        message = what if where is None else f"{where}: {what}"
        details = [f"{name} {value}" for name, value in (("got", got), ("wanted", wanted))
                   if value is not None]
        if details:
            message += f": {', '.join(details)}"
        if hint is not None:
            message += f"; {hint}"
        super().__init__(_one_line(message))


class UsageError(IgnisError):
    """The caller asked for something that makes no sense."""


class PromptTooLongError(UsageError):
    """A prompt with more tokens than the context holds."""


class ModelFileError(IgnisError):
    """A GGUF file that is truncated, inconsistent, or not a GGUF file."""


class UnsupportedModelError(ModelFileError):
    """A sound file of a kind (architecture, tensor type, tokenizer) that Ignis cannot run."""


class TokenizerError(IgnisError):
    """A vocabulary, a special token or a chat template that cannot be used."""


class GraphError(IgnisError):
    """Malformed IR: a rule of the verifier, the parser, type inference or the plan is broken."""


class KernelError(IgnisError):
    """A kernel that cannot be traced, compiled or loaded."""


class NumericsError(IgnisError):
    """NaN or infinity where a finite number must stand."""


class DownloadError(IgnisError):
    """A model that could not be fetched or whose bytes are not the expected ones."""


class WriteError(IgnisError):
    """A model file that could not be written: no room, no permission, no folder."""


def _one_line(text: str) -> str:
    """Replace line breaks and other control characters: names come from untrusted files."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
