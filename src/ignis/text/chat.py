"""Chat messages to token ids, by the template in the model file.

The file's Jinja template turns messages into text such as

    <|im_start|>user
    Hi<|im_end|>
    <|im_start|>assistant

in which `<|im_start|>` must become a control token, but only where the template wrote it. The text
of a message never becomes a control token, whatever the template does with it; how, is told in
`chat_worker`, which renders in a process of its own, with limits on time, memory and output.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import regex

from ignis.errors import TokenizerError, UsageError
from ignis.text.chat_process import WorkerProcess
from ignis.text.tokenizer import Tokenizer

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# A template may build a control token from a role, as in '<|' + message.role + '|>', but only
# from one of these; any other role is plain text.
ROLES = ("system", "user", "assistant", "tool", "developer", "function", "model", "ipython",
         "tool_response")  # fmt: skip
MAX_TEMPLATE_CHARACTERS = 1 << 20
_MIN_ROOM = 1 << 20  # characters that a template may add to the messages
_PRIVATE = range(0x40000, 0xE0000)  # planes 4 to 13: no character is, or will soon be, assigned

Message = Mapping[str, Any]


class Segment(NamedTuple):
    """A piece of a rendered chat: a control token, or plain text (`token_id` None)."""

    text: str
    token_id: int | None = None


class ChatTemplate:
    """Renders and encodes chats; ChatML where the file has no template.

    `worker` is the process that renders, which may have been started already; it is closed with
    the template.
    """

    def __init__(
        self, source: str | None, tokenizer: Tokenizer, worker: WorkerProcess | None = None
    ) -> None:
        self.source = CHATML if source is None else source
        if len(self.source) > MAX_TEMPLATE_CHARACTERS:
            raise TokenizerError("the chat template is too long", got=len(self.source),
                                 wanted=f"up to {MAX_TEMPLATE_CHARACTERS} characters")  # fmt: skip
        self._tokenizer = tokenizer
        self._worker = worker or WorkerProcess()
        vocabulary = tokenizer.vocabulary
        spellings = {vocabulary.text_at(i): i for i in sorted(vocabulary.control_ids, reverse=True)}
        # White space is not sealed, so that templates can trim it.
        self._control = {s: i for s, i in spellings.items() if not regex.search(r"\s", s)}
        self._alphabet = sorted(frozenset("".join(self._control)))
        ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
        self._trusted = {name: "" if i is None else vocabulary.text_at(i)
                         for name, i in ids.items()}  # fmt: skip

    def close(self) -> None:
        """Stop the process that renders; the next use starts another."""
        self._worker.close()

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: Any
    ) -> list[Segment]:
        """The chat as plain text and control tokens; `variables` are further template variables.

        Raises `UsageError` for malformed messages, and `TokenizerError` where the template fails,
        refuses the messages, takes too long, or writes too much.
        """
        shown = {"add_generation_prompt": add_generation_prompt, **variables}
        copied, size = _checked(messages, shown)
        seal = self._seal(json.dumps([copied, shown], ensure_ascii=False) + self.source)
        job = {
            "source": self.source, "messages": copied, "variables": shown, "seal": seal,
            "control": list(self._control), "trusted": self._trusted, "roles": ROLES,
            "max_characters": _MIN_ROOM + 4 * size,
        }  # fmt: skip
        answer = self._worker.ask(json.dumps(job))
        if "text" in answer:
            return list(self._segments(answer["text"], seal))
        if "refused" in answer:
            raise TokenizerError("the chat template refuses these messages", got=answer["refused"])
        raise TokenizerError("the chat template cannot be rendered", got=answer["error"])

    def encode(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Token ids of a chat, with BOS first where the file says so."""
        ids: list[int] = []
        for segment in self.render(messages, add_generation_prompt, **variables):
            if segment.token_id is not None:
                ids.append(segment.token_id)
            else:
                ids += self._tokenizer.encode(segment.text, after=ids[-1] if ids else None)
        bos = self._tokenizer.bos_id
        if self._tokenizer.add_bos and bos is not None and ids[:1] != [bos]:
            ids.insert(0, bos)
        return ids

    def _seal(self, text: str) -> dict[str, str]:
        """A private code point for each character of a control token, none of them in `text`."""
        taken = {c for c in frozenset(text) if ord(c) in _PRIVATE}
        free = [chr(c) for c in _PRIVATE if chr(c) not in taken] if len(taken) > 1 << 16 else None
        chosen: set[str] = set()
        while len(chosen) < len(self._alphabet):
            if free is not None and len(free) < 2 * len(self._alphabet):
                raise UsageError("the messages hold too many unassigned characters")
            code = secrets.choice(free) if free else chr(secrets.choice(_PRIVATE))
            if code not in taken:
                chosen.add(code)
        return dict(zip(self._alphabet, chosen, strict=True))

    def _segments(self, sealed: str, seal: dict[str, str]) -> Iterator[Segment]:
        """Cut at the control tokens that are sealed from end to end, and open the rest."""
        spelled = {"".join(map(seal.__getitem__, s)): s for s in self._control}
        # Few of a thousand control tokens occur, and each in the pattern costs time.
        tokens = {code: s for code, s in spelled.items() if code in sealed}
        opened = str.maketrans({code: plain for plain, code in seal.items()})
        end = 0
        for match in regex.finditer(r"\L<tokens>", sealed, tokens=list(tokens)) if tokens else ():
            if match.start() > end:
                yield Segment(sealed[end : match.start()].translate(opened))
            spelling = tokens[match.group()]
            yield Segment(spelling, self._control[spelling])
            end = match.end()
        if end < len(sealed):
            yield Segment(sealed[end:].translate(opened))


def _checked(
    messages: Sequence[Any], variables: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], int]:
    """A copy of the messages, made of plain JSON values, and its size in characters."""
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise UsageError("a chat message needs a role", where=f"message {index}",
                             got=repr(message)[:80], wanted='{"role": ..., "content": ...}')
    try:
        text = json.dumps([[dict(message) for message in messages], dict(variables)])
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"chat messages must be plain JSON values: {error}") from None
    return json.loads(text)[0], len(text)
