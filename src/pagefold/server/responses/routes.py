"""``/v1/responses``: answer, tell again, forget."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response

from pagefold.errors import InvalidRequestError
from pagefold.server.answer import whole_answer
from pagefold.server.answer_schemas import STREAMED, DeletedResponse, OpenAIResponse
from pagefold.server.checked_route import CheckedRoute
from pagefold.server.errors import PreviousResponseError, ResponseNotFoundError
from pagefold.server.event_stream import EventStream
from pagefold.server.generation import Generation
from pagefold.server.keys import account_of
from pagefold.server.parts import PartReader
from pagefold.server.request_log import attach_generation
from pagefold.server.responses.events import response_events
from pagefold.server.responses.form import ResponseForm
from pagefold.server.responses.items import ITEMS, chat_of, kept, kept_output
from pagefold.server.responses.schemas import ResponseRequest  # noqa: TC001 - FastAPI reads it
from pagefold.server.retention import hints_of
from pagefold.server.schemas import MAX_PARTS
from pagefold.server.wanted import wanted

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagefold.server.diagnoses import Diagnoses
    from pagefold.server.responses.items import Item
    from pagefold.server.responses.store import ResponseStore
    from pagefold.server.served import Served

__all__ = ["response_routes"]

_NUM_SHOWN_CHARACTERS = 80


def response_routes(served: Served, store: ResponseStore, diagnoses: Diagnoses) -> APIRouter:
    """Return the routes."""
    router = APIRouter(route_class=CheckedRoute)

    @router.post("/v1/responses", response_model=None, responses={200: {"model": OpenAIResponse, "content": STREAMED}})
    async def create_response(asked: ResponseRequest, request: Request) -> Response:
        """Answer a text or the last message of a chat."""
        served.admit(asked, request)
        account = account_of(request.scope)
        items = _items_of(asked, store, account.tenant)
        want = wanted(asked.asked_tools(), asked.text.structured(), served)
        sampling = asked.sampling()
        form = ResponseForm(asked, served.name_of(asked), is_stored=_is_stored(asked, store))
        chat = await served.prepare_chat(
            chat_of(asked.instructions, items), want.tools, param="input", receive=request.receive
        )
        structured = chat.thinking.before(want.structured)
        hints = hints_of(asked.prompt_cache_retention, chat.token_ids)
        generation = Generation(
            served.client,
            request_id=form.response_id,
            prompts=[chat.token_ids],
            sampling=chat.thinking.sampling(sampling, structured),
            caller=replace(served.caller_of(asked, request), hint_pins=hints),
            param="input",
            grammar=await served.compile(structured),
            thinking=chat.thinking,
        )
        await generation.begin(request.receive)
        attach_generation(request.scope, generation)
        diagnoses.note(account.tenant, form.response_id, chat.fingerprint, len(chat.token_ids))
        compared_id = asked.prompt_cache_options.comparison_response_id

        def diagnose() -> dict[str, Any] | None:
            if compared_id is None:
                return None
            return diagnoses.diagnose(account.tenant, compared_id, generation).as_openai()

        reader = PartReader(want.reader(chat.thinking))
        answer = _Answer(form, generation, reader, items, store, account.tenant, diagnose)
        if asked.stream:
            events = response_events(form, generation, answer.reader, answer.end)
            return EventStream(events, on_end=generation.close, is_typed=True)
        return await whole_answer(generation, request, answer.whole)

    @router.get("/v1/responses/{response_id}", response_model=None, responses={200: {"model": OpenAIResponse}})
    async def retrieve_response(response_id: str, request: Request) -> Response:
        """Tell a stored response again."""
        if request.query_params.get("stream", "false").lower() == "true":
            msg = "A stored response is told whole: its events are not kept."
            raise InvalidRequestError(msg, param="stream", remedy="Leave it out.")
        stored = store.get(account_of(request.scope).tenant, response_id)
        if stored is None:
            raise _not_found(response_id)
        return Response(stored.response, media_type="application/json")

    @router.delete("/v1/responses/{response_id}", responses={200: {"model": DeletedResponse}})
    async def delete_response(response_id: str, request: Request) -> dict[str, Any]:
        """Forget a stored response; those that went on from it stay."""
        if not store.delete(account_of(request.scope).tenant, response_id):
            raise _not_found(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    return router


@dataclass(frozen=True, slots=True)
class _Answer:
    """A response that is being made.

    Attributes:
        form: how it is written.
        generation: what answers.
        reader: of its output.
        items: of the conversation before it.
        store: keeps it at its end, if its form says so.
        tenant: the tenant who asked.
        diagnose: tells what changed since an earlier response, if that is asked.
    """

    form: ResponseForm
    generation: Generation
    reader: PartReader
    items: list[Item]
    store: ResponseStore
    tenant: str
    diagnose: Callable[[], dict[str, Any] | None]

    def whole(self) -> dict[str, Any]:
        """Read all of the output at once, and end."""
        self.reader.read("".join(self.generation.outputs[0].text))
        return self.end()

    def end(self) -> dict[str, Any]:
        """Return the whole response, and have it stored. What is too large for the store is not stored, and says so."""
        response = self.form.ended(self.generation, self.reader, self.diagnose())
        if response["store"]:
            items = [*kept(self.items), *kept_output(self.reader.parts)]
            response["store"] = self.store.put(self.tenant, response, items)
        return response


def _is_stored(asked: ResponseRequest, store: ResponseStore) -> bool:
    if asked.store and not store.is_on:
        msg = "store is true, and this server keeps no responses."
        raise InvalidRequestError(msg, param="store", remedy="Leave it out, or start with --responses-store-bytes.")
    return store.is_on if asked.store is None else asked.store


def _items_of(asked: ResponseRequest, store: ResponseStore, tenant: str) -> list[Item]:
    """Return the whole conversation: that of the previous response, and what is asked now."""
    if asked.previous_response_id is None:
        return asked.input
    stored = store.get(tenant, asked.previous_response_id)
    if stored is None:
        msg = f"Previous response with id {_shown(asked.previous_response_id)} not found."
        remedy = "It was not stored, was deleted, or had to make room: send the whole conversation as input."
        raise PreviousResponseError(msg, param="previous_response_id", remedy=remedy)
    items = [*ITEMS.validate_python(json.loads(stored.items)), *asked.input]
    if len(items) > MAX_PARTS:
        msg = f"With what previous_response_id stands for, the input has {len(items)} items."
        raise InvalidRequestError(msg, param="previous_response_id", remedy=f"There may be {MAX_PARTS}.")
    return items


def _not_found(response_id: str) -> ResponseNotFoundError:
    msg = f"Response with id {_shown(response_id)} not found."
    return ResponseNotFoundError(msg, remedy="It was not stored, was deleted, or had to make room.")


def _shown(response_id: str) -> str:
    return ascii(response_id)[:_NUM_SHOWN_CHARACTERS]
