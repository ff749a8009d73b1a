"""REST routes for approvals and secrets. Imported for its entries in the table of `rest`."""

from atoll import model
from atoll.server.request import Exchange
from atoll.server.routes import SANDBOX, Rest, route

APPROVAL = "/v1/approvals/{approval}"


@route("POST", f"{SANDBOX}/approvals", "Ask for an action's approval", verb="approvals.request", status=201)
async def ask(rest: Rest, exchange: Exchange) -> None:
    request = await exchange.json(model.AskApproval)
    await exchange.answer(await rest.core.approvals.request(exchange.who, exchange.ref, request.action), 201)


@route("GET", "/v1/approvals", "Approvals nobody has decided yet", verb="approvals.pending")
async def pending(rest: Rest, exchange: Exchange) -> None:
    await exchange.answer({"approvals": await rest.core.approvals.pending(exchange.who)})


@route("GET", APPROVAL, "One approval", verb="approvals.get")
async def get(rest: Rest, exchange: Exchange) -> None:
    await exchange.answer(await rest.core.approvals.get(exchange.who, exchange.parts[2]))


@route("POST", f"{APPROVAL}/wait", "Wait for the decision, and use it", verb="approvals.wait")
async def wait(rest: Rest, exchange: Exchange) -> None:
    request = await exchange.json(model.WaitApproval)
    work = rest.core.approvals.wait(exchange.who, exchange.parts[2], request.timeout_s)
    await exchange.answer(await exchange.while_connected(work))


@route(
    "POST", f"{APPROVAL}/challenge", "Show on the caller's terminal what a decision needs", verb="approvals.challenge"
)
async def challenge(rest: Rest, exchange: Exchange) -> None:
    await exchange.json(model.Request)
    await exchange.answer(await rest.core.approvals.challenge(exchange.who, exchange.parts[2]))


@route("POST", f"{APPROVAL}/decide", "Approve or reject", verb="approvals.decide")
async def decide(rest: Rest, exchange: Exchange) -> None:
    asked = await exchange.json(model.DecideApproval)
    found = await rest.core.approvals.decide(
        exchange.who, exchange.parts[2], asked.approved, asked.reason, asked.answer
    )
    await exchange.answer(found)


@route("GET", "/v1/secrets", "Names and keys of the caller's secrets, never values", verb="secrets.list")
async def list_secrets(rest: Rest, exchange: Exchange) -> None:
    await exchange.answer({"secrets": await rest.core.secrets.list(exchange.who)})


@route("PUT", "/v1/secrets/{name}", "Keep a value; it cannot be read back", verb="secrets.set")
async def set_secret(rest: Rest, exchange: Exchange) -> None:
    asked = await exchange.json(model.SetSecret)
    await rest.core.secrets.set(exchange.who, exchange.parts[2], asked.key, asked.value)
    await exchange.answer({"ok": True, "name": exchange.parts[2], "key": asked.key})


@route("DELETE", "/v1/secrets/{name}", "Forget a secret, or one key of it", verb="secrets.remove", query=("key",))
async def remove_secret(rest: Rest, exchange: Exchange) -> None:
    key = exchange.query("key").get("key") or ""
    await rest.core.secrets.remove(exchange.who, exchange.parts[2], key)
    await exchange.answer({"ok": True})
