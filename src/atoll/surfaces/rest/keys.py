"""REST routes for API keys and the certificates issued for them. Imported for its entries in the table of `rest`."""

from atoll import model
from atoll.server.request import Exchange, flag
from atoll.server.routes import Rest, route


@route("GET", "/v1/keys", "API keys, without the keys themselves", query=("revoked",), verb="keys.list")
async def list_keys(rest: Rest, exchange: Exchange) -> None:
    revoked = flag(exchange.query("revoked"), "revoked")
    await exchange.answer({"keys": await rest.core.key_verbs.list(exchange.who, revoked)})


@route("POST", "/v1/keys", "Make a key; the answer is the only place it is shown", status=201, verb="keys.create")
async def create_key(rest: Rest, exchange: Exchange) -> None:
    asked = await exchange.json(model.CreateKey)
    await exchange.answer(await rest.core.key_verbs.create(exchange.who, asked), 201)


@route(
    "POST",
    "/v1/keys/challenge",
    "Show on the caller's terminal what a key that can approve takes",
    verb="keys.challenge",
)
async def challenge_key(rest: Rest, exchange: Exchange) -> None:
    asked = await exchange.json(model.ChallengeKey)
    await exchange.answer({"needed": await rest.core.key_verbs.challenge(exchange.who, asked)})


@route("POST", "/v1/keys/revoke", "End a key, and every certificate issued for it, at once", verb="keys.revoke")
async def revoke_key(rest: Rest, exchange: Exchange) -> None:
    asked = await exchange.json(model.NamedKey)
    await exchange.answer(await rest.core.key_verbs.revoke(exchange.who, asked))


@route("POST", "/v1/keys/import", "Take over K8E's keys.json", verb="keys.import")
async def import_keys(rest: Rest, exchange: Exchange) -> None:
    asked = await exchange.json(model.ImportKeys)
    await exchange.answer({"keys": await rest.core.key_verbs.bring_in(exchange.who, asked)})


@route("GET", "/v1/keys/certificates", "Client certificates that Login has issued", verb="certificates.list")
async def list_certificates(rest: Rest, exchange: Exchange) -> None:
    await exchange.answer({"certificates": await rest.core.key_verbs.list_certificates(exchange.who)})


@route("POST", "/v1/keys/certificates/revoke", "End one certificate at once", verb="certificates.revoke")
async def revoke_certificate(rest: Rest, exchange: Exchange) -> None:
    asked = await exchange.json(model.NamedCertificate)
    await exchange.answer(await rest.core.key_verbs.revoke_certificate(exchange.who, asked))
